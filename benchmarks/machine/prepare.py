# SPDX-License-Identifier: Apache-2.0
"""What a bare GPU machine lacks, for ``gpu_machine.py``: packages, the kernels' folder, the CUDA
extension. Needs the standard library alone.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine.job import TIMED_OUT, Job

NEEDED = ("torch", "triton", "pytest", "xdist")
"""Without them no test runs; all else that is missing is a row of the record."""
MISSING = (
    "import sys, importlib.util as util;"
    "print(*[n for n in sys.argv[1:] if not util.find_spec(n)], sep='\\n')"
)
BUILD = ("setup.py", "build_ext", "--inplace")
BUILD_SECONDS = 150
DEVICE = "import torch; p = torch.cuda.get_device_properties(0);print(p.major, p.name, sep='\\n')"


def install(job: Job, wheels: Path, site: Path) -> None:
    """Install the wheels into ``site``, which precedes what is installed. The checkout precedes it:
    BackPACK's wheel has a package ``benchmarks`` too.
    """
    found = sorted(map(str, wheels.glob("*.whl")))
    path = os.environ.get("PYTHONPATH")
    first = [str(job.root), str(site)]
    job.environment["PYTHONPATH"] = os.pathsep.join([*first, *([path] if path else [])])
    job.environment["PATH"] = f"{site / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    if found:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        pip += ["--no-compile", "--no-cache-dir", "--target", str(site), *found]
        if job.run(pip, 120):
            raise SystemExit(f"pip did not install the wheels of {wheels}: see above")
    if missing := output_lines(job, [sys.executable, "-c", MISSING, *NEEDED]):
        remedy = "on a machine with a network `make gpu-wheels` fills .whl: bring it along"
        raise SystemExit(
            f"missing here: {', '.join(missing)}; {remedy} (torch and Triton are the machine's own)"
        )


def output_lines(job: Job, command: list[str]) -> list[str]:
    """The lines that a program prints; its standard error goes to the log."""
    where: dict[str, Any] = {"cwd": job.root, "env": job.environment}
    with job.log.open("ab") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, **where)
    job.show()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}")
    return done.stdout.strip().splitlines()


def link(job: Job) -> None:
    """Link ``gnsfast.triton_kernels`` to the folder that an installation maps to it."""
    try:
        importlib.metadata.distribution("gnsfast")
    except importlib.metadata.PackageNotFoundError:
        folder = job.root / "gnsfast" / "triton_kernels"
        if not folder.exists():
            folder.symlink_to("../triton_kernels")
            job.say("gnsfast/triton_kernels is linked to ../triton_kernels")


def build(job: Job) -> None:
    """Build ``gnsfast._C`` in the checkout, for this device alone, unless a former call built it
    from the same files with the same compiler. A row of the record tells how it went.
    """
    try:
        major, gpu = output_lines(job, [sys.executable, "-c", DEVICE])
    except SystemExit as error:
        raise SystemExit(f"torch finds no CUDA device: {error}; --rehearse runs on a CPU") from None
    for stale in (job.root / "gnsfast").glob("_C*.so"):
        stale.unlink()
    start = time.monotonic()
    status, result = built(job, f"{major}0")  # all devices of this generation run it
    row = {"check": "CUDA extension", "exit status": status, "result": result}
    row["s"] = round(time.monotonic() - start)
    job.say(f"CUDA extension: {result}")
    today = datetime.date.today().isoformat()
    data = {"command": " ".join(["python", *BUILD]), "machine": {"gpu": gpu, "date": today}}
    data["tables"] = {"The CUDA extension": [row]}
    path = job.records / f"{today}-gpu-extension.json"
    path.write_text(json.dumps(data, indent=1) + "\n")


def built(job: Job, arch: str) -> tuple[int, str]:
    """Exit status, and what the record says."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if shutil.which(nvcc) is None:
        return 1, f"there is no nvcc at {nvcc}: CUDACXX names another"
    compiler = "\n".join(output_lines(job, [nvcc, "--version"]))
    folder = job.results / "extension" / key(job.root, arch, compiler)
    package = job.root / "gnsfast"
    if kept := sorted(folder.glob("_C*.so")):
        shutil.copy2(kept[0], package)
        return 0, "built by a former call"
    failed = folder / "failed"
    if failed.exists():
        return 1, f"the build failed in a former call: without {failed} it is tried again"
    environment = {"GNSFAST_CUDA": "1", "GNSFAST_CUDA_ARCHS": arch, "CUDACXX": nvcc}
    environment["GNSFAST_CUDA_VARIANTS"] = "1"
    seconds = min(BUILD_SECONDS, job.left())
    status = job.run([sys.executable, *BUILD], seconds, **environment)
    made = sorted(package.glob("_C*.so"))
    for other in folder.parent.iterdir():
        shutil.rmtree(other)
    folder.mkdir()
    if status or not made:
        if status != TIMED_OUT or seconds == BUILD_SECONDS:
            failed.touch()  # or every call would spend these seconds
        why = "took too long" if status == TIMED_OUT else "failed"
        return status or 1, f"the build {why}: see the log; all else runs without it"
    partial = job.results / "extension.partial"
    shutil.copy2(made[0], partial)
    partial.replace(folder / made[0].name)
    job.pack()
    return 0, "built"


def key(root: Path, arch: str, compiler: str) -> str:
    """A hash of everything that goes into the built file."""
    files = (path for path in sorted((root / "csrc").rglob("*")) if path.is_file())
    sources = [path for path in files if path.suffix != ".pyc"]
    digest = hashlib.sha256()
    for path in (*sources, root / "setup.py"):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    digest.update(f"{arch}\n{sys.version}\n{compiler}".encode())
    return digest.hexdigest()[:16]

# SPDX-License-Identifier: Apache-2.0
"""Tries the files of a release as a stranger would: each in an environment and a folder of its own.

``make dist`` runs ``python tests/release.py dist``. It installs each file, runs the README's first
example there, and compares what comes out. The dependencies come from the environment that runs it.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAST_LINES = """
import json
from pathlib import Path
from gnsfast.ops import backends
import gnsfast.triton_kernels
here = str(Path(gnsfast.__file__).parent)
kernel = not backends.missing("cpu", "cpu")
spread = gns.compute().trace
print(json.dumps(
    {"version": gnsfast.__version__, "here": here, "kernel": kernel, "trace": spread}))
"""


def tried(artifact: Path, folder: Path) -> dict[str, str | bool | float]:
    """What the README's example says of ``artifact``, installed into a new ``folder``."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    # The sdist compiles the CPU kernel. It leaves the CUDA kernels alone, which take minutes.
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    alone |= {"GNSFAST_CUDA": "0", "GNSFAST_CPU": "1", "OMP_NUM_THREADS": "1"}
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", artifact]
    subprocess.run(pip, check=True, env=alone)
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    seeded = example.replace("import torch, gnsfast", "import torch, gnsfast; torch.manual_seed(0)")
    (folder / "example.py").write_text(seeded + LAST_LINES)

    def run(*command: str | Path) -> str:
        asked = {"check": True, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run([*command], cwd=folder, env=alone, **asked).stdout

    run(folder / "bin/gnsfast", "doctor")
    said = json.loads(run(folder / "bin/python", "example.py").splitlines()[-1])
    assert Path(said.pop("here")).resolve().is_relative_to(folder.resolve()), artifact
    return said


def main(dist: Path) -> None:
    artifacts = sorted(dist.iterdir())
    for kind in ("manylinux", "none-any", ".tar.gz"):
        assert any(kind in artifact.name for artifact in artifacts), f"{dist} has no {kind}"
    traces = []
    for artifact in artifacts:
        with tempfile.TemporaryDirectory() as folder:
            said = tried(artifact.resolve(), Path(folder))
        print(f"{artifact.name}: {said}")
        assert f"-{said['version']}" in artifact.name, artifact
        assert said["kernel"] != ("none-any" in artifact.name), artifact
        traces.append(said["trace"])
    assert max(traces) <= min(traces) * (1 + 1e-4), traces


if __name__ == "__main__":
    main(Path(sys.argv[1]))

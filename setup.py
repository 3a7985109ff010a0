# SPDX-License-Identifier: Apache-2.0
"""Builds the optional CUDA extension ``gnsfast._C`` where there is an nvcc; else pure Python.

``GNSFAST_CUDA=0`` never builds it, ``1`` fails without nvcc, ``auto`` (the default) says in one
line which it is. An nvcc that fails is an error in any case.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

CSRC = Path("csrc")
OLDEST = (12, 5)  # of CUDA: cudaGetDriverEntryPointByVersion
GENERIC = ("80", "90", "100", "120")
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"
PORTABLE = " ".join(
    [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in GENERIC]
    + [f"-gencode=arch=compute_{GENERIC[-1]},code=compute_{GENERIC[-1]}"]
)
# The architectures of each file: sm_90a has instructions that sm_90 alone does not; generic code
# carries what the driver of a later device compiles.
UNITS = {
    "linear_wgrad_sm90.cu": HOPPER,
    "variants_sm90.cu": HOPPER,
    "linear_wgrad_sm80.cu": PORTABLE,
    "token_sqnorms.cu": PORTABLE,
}


def find_nvcc() -> str | None:
    """The compiler of ``CUDACXX``, of ``CUDA_HOME``, of the path, or of /usr/local/cuda."""
    wanted = os.environ.get("GNSFAST_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"GNSFAST_CUDA={wanted}: it must be 0, 1 or auto")
    if wanted == "0":
        print("gnsfast: GNSFAST_CUDA=0, installing without the CUDA extension", file=sys.stderr)
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = os.environ.get("CUDACXX")
    candidates = [named] if named else [f"{home}/bin/nvcc" for home in homes]
    candidates += [] if named else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    why = f"CUDACXX={named} does not run" if named else "there is no nvcc that runs"
    for nvcc in filter(None, map(shutil.which, candidates)):
        # A wrapper on the path may point at a toolkit that is gone: ask it.
        asked = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        release = re.search(r"release (\d+)\.(\d+)", asked.stdout)
        if asked.returncode == 0 and release:
            if (int(release[1]), int(release[2])) >= OLDEST:
                return nvcc
            why = f"{nvcc} is of CUDA {release[1]}.{release[2]}, older than 12.5"
    if wanted == "1" or (named and "older" not in why):
        raise SystemExit(f"gnsfast: {why}; GNSFAST_CUDA=0 installs without the CUDA extension")
    print(f"gnsfast: {why}: installing without the CUDA extension", file=sys.stderr)
    return None


def toolkit(nvcc: str) -> Path:
    """Where the toolkit is: what nvcc itself says, as it may be a wrapper."""
    dry = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    said = subprocess.run(dry, capture_output=True, text=True).stderr
    tops = [line.removeprefix("#$ TOP=") for line in said.splitlines() if "TOP=" in line]
    return Path(tops[0]).resolve() if tops else Path(nvcc).resolve().parents[1]


def escaped(path: Path) -> str:
    """A path in a build line of ninja."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def extension(nvcc: str) -> dict[str, Any]:
    """setup()'s arguments: ninja compiles the kernels, pybind11's helpers the bindings."""
    try:
        import ninja
        from pybind11.setup_helpers import Pybind11Extension, build_ext
    except ImportError as error:
        raise SystemExit(
            f"gnsfast: {error}: pip install pybind11 ninja, or GNSFAST_CUDA=0 to install without "
            "the CUDA extension"
        ) from error

    class BuildKernels(build_ext):  # type: ignore[misc]
        def build_extension(self, ext: Any) -> None:
            folder = Path(self.build_temp).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            flags = "-std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden"
            compiler = shlex.quote(nvcc).replace("$", "$$")
            lines = [
                "rule cu",
                f"  command = {compiler} {flags} $arch -MD -MF $out.d -c $in -o $out",
            ]
            lines += ["  depfile = $out.d", "  deps = gcc"]
            for name, arch in UNITS.items():
                source = (CSRC / name).resolve()
                built, needed = (escaped(path) for path in (folder / f"{name}.o", source))
                lines += [f"build {built}: cu {needed}", f"  arch = {arch}"]
            (folder / "build.ninja").write_text("\n".join(lines) + "\n")
            subprocess.check_call([Path(ninja.BIN_DIR) / "ninja", "-C", folder])
            ext.extra_objects = [str(folder / f"{name}.o") for name in UNITS]
            ext.depends = [*ext.depends, *ext.extra_objects]  # or a changed kernel is not linked
            super().build_extension(ext)

    top = toolkit(nvcc)
    module = Pybind11Extension(
        "gnsfast._C",
        [str(CSRC / "bindings.cpp")],
        cxx_std=17,
        include_dirs=[str(CSRC)],
        library_dirs=[str(top / "lib64"), str(top / "lib")],
        libraries=["cudart_static", "dl", "rt", "pthread"],  # torch has a runtime of its own
        extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,-s"],
        depends=[str(path) for path in CSRC.glob("*.h")],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildKernels}}


nvcc = find_nvcc()
setup(**(extension(nvcc) if nvcc else {}))

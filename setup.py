# SPDX-License-Identifier: Apache-2.0
"""Builds two optional extensions: the CPU kernel ``gnsfast._cpu`` where there is a C++ compiler,
and the CUDA kernels ``gnsfast._C`` where there is an nvcc. Without both gnsfast is pure Python.

``GNSFAST_CPU=0`` never builds the CPU kernel, ``1`` fails where it cannot be built, ``auto`` (the
default) installs without it and says why. It is for Linux on x86-64, by GCC or Clang.

``GNSFAST_CUDA=0`` never builds the CUDA kernels, ``1`` fails without nvcc, ``auto`` (the default)
says in one line which it is. An nvcc that fails is an error in any case.

``GNSFAST_CUDA_ARCHS="80 90"`` builds it for these devices alone, which takes less time; commas and
semicolons separate them too. Known are 80, 90, 100 and 120. Without the variable it is built for
all that nvcc compiles for: 100 and 120 came with CUDA 12.8. On a newer device the driver compiles
what was built for the newest of the list. Hopper's own kernel is built where 90 is in the list;
without it, asking for that kernel is an error. ``GNSFAST_CUDA_VARIANTS=1`` adds the variants of
Hopper's kernel that the benchmarks time.

The ``ninja`` of the installed package builds it, or where that has none (``pip install --target``)
the one on the ``PATH``.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
OLDEST = (12, 5)  # of CUDA: cudaGetDriverEntryPointByVersion
# The CUDA that first compiles for each architecture; the oldest comes first.
SINCE = {"80": OLDEST, "90": OLDEST, "100": (12, 8), "120": (12, 8)}
# sm_90a has instructions that sm_90 alone does not.
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"
HOPPER_UNITS = ("linear_wgrad_sm90.cu",)
VARIANT_UNITS = ("variants_sm90.cu",)
CPU_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
CPU_UNITS = ("bindings.cpp", "linear_wgrad.cpp", "gram.cpp", "norm_backward.cpp")
CPU_UNITS += ("embedding_wgrad.cpp", "transpose.cpp")
BFLOAT16_UNITS = ("bfloat16_wgrad.cpp", "bfloat16_gram.cpp", "amx_wgrad.cpp", "amx_gram.cpp")
BFLOAT16_FLAG = "-DGNSFAST_BFLOAT16"
# What an old assembler or compiler does not know.
BFLOAT16_PROBE = """
#include <immintrin.h>
#define HALVES __attribute__((target("avx512bf16")))
HALVES __m512bh narrowed(__m512 v) { return _mm512_cvtne2ps_pbh(v, v); }
int main() { asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0"); }
"""
GENERIC_UNITS = ("linear_wgrad_sm80.cu", "token_sqnorms.cu", "finish.cu")


def architectures(release: tuple[int, int]) -> list[str]:
    """What an nvcc of this CUDA compiles for: all that it can, or ``GNSFAST_CUDA_ARCHS``."""
    names = re.findall(r"[^\s,;]+", os.environ.get("GNSFAST_CUDA_ARCHS", ""))
    if unknown := [arch for arch in names if arch not in SINCE]:
        raise SystemExit(
            f"GNSFAST_CUDA_ARCHS has no architecture {unknown[0]}: it takes {', '.join(SINCE)}"
        )
    late = [arch for arch, since in SINCE.items() if since > release]
    if refused := [arch for arch in names if arch in late]:
        raise SystemExit(
            f"GNSFAST_CUDA_ARCHS names {refused[0]}, which nvcc of CUDA {release[0]}.{release[1]} "
            f"cannot compile for: take CUDA 12.8 or later, or a list without {refused[0]}"
        )
    if late and not names:
        left_out = f"nvcc of CUDA {release[0]}.{release[1]} leaves out {' and '.join(late)}"
        print(f"gnsfast: {left_out}, which need CUDA 12.8", file=sys.stderr)
    return [arch for arch in SINCE if arch not in late and arch in (names or SINCE)]


def units(archs: list[str]) -> dict[str, str]:
    """The flags of each file: generic code carries what the driver of a later device compiles."""
    codes = [(arch, f"sm_{arch}") for arch in archs] + [(archs[-1], f"compute_{archs[-1]}")]
    generic = " ".join(f"-gencode=arch=compute_{arch},code={code}" for arch, code in codes)
    wanted = HOPPER_UNITS
    if os.environ.get("GNSFAST_CUDA_VARIANTS") == "1":
        wanted += VARIANT_UNITS
    hopper = wanted if "90" in archs else ()
    return dict.fromkeys(GENERIC_UNITS, generic) | dict.fromkeys(hopper, HOPPER)


def asked(variable: str, what: str) -> str:
    """``0``, ``1`` or ``auto``."""
    wanted = os.environ.get(variable, "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"{variable}={wanted}: it must be 0, 1 or auto")
    if wanted == "0":
        print(f"gnsfast: {variable}=0, installing without the {what}", file=sys.stderr)
    return wanted


def find_nvcc() -> tuple[str, tuple[int, int]] | None:
    """The nvcc of ``CUDACXX``, of ``CUDA_HOME``, of the path, or of /usr/local/cuda; its CUDA."""
    wanted = asked("GNSFAST_CUDA", "CUDA extension")
    if wanted == "0":
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = os.environ.get("CUDACXX")
    candidates = [named] if named else [f"{home}/bin/nvcc" for home in homes]
    candidates += [] if named else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    why = f"CUDACXX={named} does not run" if named else "there is no nvcc that runs"
    for nvcc in filter(None, map(shutil.which, candidates)):
        # A wrapper on the path may point at a toolkit that is gone: ask it.
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
        if answer.returncode == 0 and release:
            of_cuda = int(release[1]), int(release[2])
            if of_cuda >= OLDEST:
                return nvcc, of_cuda
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


class Build(build_ext):  # type: ignore[misc]
    """Links what ninja compiled, where an extension has kernels of its own."""

    def build_extension(self, ext: Any) -> None:
        if compile_kernels := getattr(ext, "compile_kernels", None):
            folder = Path(self.build_temp).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            ext.extra_objects = compile_kernels(folder)
            ext.depends = [*ext.depends, *ext.extra_objects]  # or a changed kernel is not linked
        super().build_extension(ext)


def _runs(command: list[str], text: str = "") -> bool:
    try:
        return subprocess.run(command, capture_output=True, input=text.encode()).returncode == 0
    except OSError:
        return False


def cpu_extension() -> Any | None:
    """The CPU kernel, or None where it is not wanted or no compiler is known to take it."""
    wanted = asked("GNSFAST_CPU", "CPU kernel")
    if wanted == "0":
        return None
    why = ""
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError as error:
        why = f"{error}: pip install pybind11"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    if not _runs([*compiler, "-dumpversion"]):
        why = f"{compiler[0]} does not run: install a C++ compiler, or name one by CXX"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        why = f"it is for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    if why and wanted == "1":
        raise SystemExit(f"gnsfast: no CPU kernel: {why}; GNSFAST_CPU=0 installs without it")
    if why:
        print(f"gnsfast: {why}: installing without the CPU kernel", file=sys.stderr)
        return None
    knows_bfloat16 = _runs([*compiler, "-x", "c++", "-c", "-", "-o", os.devnull], BFLOAT16_PROBE)
    if not knows_bfloat16:
        lacking = f"{compiler[0]} does not know AMX: bfloat16 has no kernels of its own"
        print(f"gnsfast: {lacking}", file=sys.stderr)
    return Pybind11Extension(
        "gnsfast._cpu",
        [str(CSRC / "cpu" / name) for name in CPU_UNITS + BFLOAT16_UNITS * knows_bfloat16],
        cxx_std=17,
        extra_compile_args=[*CPU_FLAGS, *[BFLOAT16_FLAG] * knows_bfloat16],
        extra_link_args=["-Wl,-s"],
        depends=[str(path) for path in CSRC.glob("cpu/*.h")],
        optional=wanted == "auto",  # then a compiler that fails is a warning
    )


def cuda_extension(nvcc: str, archs: list[str]) -> Any:
    """The CUDA kernels: ninja compiles them, pybind11's helpers the bindings."""
    kernels = units(archs)
    try:
        import ninja
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError as error:
        raise SystemExit(
            f"gnsfast: {error}: pip install pybind11 ninja, or GNSFAST_CUDA=0 to install without "
            "the CUDA extension"
        ) from error
    build = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if build is None:
        raise SystemExit(
            f"gnsfast: there is no ninja in {ninja.BIN_DIR} or on the PATH: pip install ninja, or "
            "GNSFAST_CUDA=0 to install without the CUDA extension"
        )

    def compile_kernels(folder: Path) -> list[str]:
        flags = "-std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden"
        compiler = shlex.quote(nvcc).replace("$", "$$")
        lines = [
            "rule cu",
            f"  command = {compiler} {flags} $arch -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        for name, arch in kernels.items():
            source = (CSRC / name).resolve()
            built, needed = (escaped(path) for path in (folder / f"{name}.o", source))
            lines += [f"build {built}: cu {needed}", f"  arch = {arch}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        subprocess.check_call([build, "-C", folder])
        return [str(folder / f"{name}.o") for name in kernels]

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
    module.compile_kernels = compile_kernels
    return module


found = find_nvcc()
extensions = [cpu_extension(), cuda_extension(found[0], architectures(found[1])) if found else None]
setup(ext_modules=[ext for ext in extensions if ext], cmdclass={"build_ext": Build})

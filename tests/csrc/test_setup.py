# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` builds: with an nvcc, without, with one that fails, and for which devices."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import setuptools

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[2]

NO_NVCC = """\
import runpy, shutil, sys
shutil.which = lambda name: None
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


def setup(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Without the CPU kernel, which takes a compiler 20 s, unless a test asks for it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "GNSFAST"))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=kept | {"GNSFAST_CPU": "0"} | environment,
    )


@pytest.mark.parametrize(
    ("wanted", "fails", "line"),
    [
        ("auto", False, "there is no nvcc that runs: installing without the CUDA extension"),
        ("0", False, "gnsfast: GNSFAST_CUDA=0, installing without the CUDA extension"),
        ("1", True, "gnsfast: there is no nvcc that runs; GNSFAST_CUDA=0 installs without"),
        ("yes", True, "GNSFAST_CUDA=yes: it must be 0, 1 or auto"),
    ],
)
def test_without_nvcc(wanted: str, fails: bool, line: str) -> None:
    done = setup(["-c", NO_NVCC], GNSFAST_CUDA=wanted)
    assert (done.returncode != 0) is fails
    assert line in done.stderr


@pytest.mark.parametrize(
    ("wanted", "fails", "line"),
    [
        ("auto", False, "gnsfast: /bin/false does not run: install a C++ compiler, or name one by"),
        ("0", False, "gnsfast: GNSFAST_CPU=0, installing without the CPU kernel"),
        ("1", True, "gnsfast: no CPU kernel: /bin/false does not run"),
        ("yes", True, "GNSFAST_CPU=yes: it must be 0, 1 or auto"),
    ],
)
def test_without_a_compiler(wanted: str, fails: bool, line: str) -> None:
    done = setup(["setup.py", "--version"], GNSFAST_CPU=wanted, GNSFAST_CUDA="0", CXX="/bin/false")
    assert (done.returncode != 0) is fails
    assert line in done.stderr


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """It is a warning, and with ``GNSFAST_CPU=1`` an error."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ntest "$1" = -dumpversion\n')
    compiler.chmod(0o755)
    build = ["setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    for wanted in ("auto", "1"):
        done = setup(build, GNSFAST_CPU=wanted, GNSFAST_CUDA="0", CXX=str(compiler))
        assert (done.returncode != 0) is (wanted == "1")
        assert 'building extension "gnsfast._cpu" failed' in done.stderr or wanted == "1"
    assert not list(tmp_path.rglob("*.so"))


def fake_nvcc(folder: Path, release: str) -> str:
    """Knows its version and compiles nothing."""
    nvcc = folder / "nvcc"
    answers = f"--version) echo release {release};; --dryrun) ;; *) exit 1;;"
    nvcc.write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    return str(nvcc)


def build_into(folder: Path) -> list[str]:
    return ["setup.py", "build_ext", "--build-temp", str(folder), "--build-lib", str(folder)]


def test_nvcc_that_fails(tmp_path: Path) -> None:
    """Never a silent installation without the kernels that were to be built."""
    pytest.importorskip("pybind11")
    nvcc = fake_nvcc(tmp_path, "13.0")
    done = setup(build_into(tmp_path), CUDACXX=nvcc, GNSFAST_CUDA_ARCHS="80")
    assert done.returncode != 0 and "ninja" in done.stderr
    assert not list(tmp_path.rglob("_C*.so"))
    asked = (tmp_path / "build.ninja").read_text()
    assert set(re.findall(r",code=(\w+)", asked)) == {"sm_80", "compute_80"}
    assert "sm90.cu" not in asked


def test_nvcc_that_is_too_old(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "12.4")
    done = setup(["setup.py", "--version"], CUDACXX=nvcc)
    assert done.returncode == 0 and "is of CUDA 12.4, older than 12.5" in done.stderr
    assert setup(["setup.py", "--version"], CUDACXX=nvcc, GNSFAST_CUDA="1").returncode != 0


def test_nvcc_that_is_not_there() -> None:
    done = setup(["setup.py", "--version"], CUDACXX="/nowhere/nvcc")
    assert done.returncode != 0 and "CUDACXX=/nowhere/nvcc does not run" in done.stderr


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of ``setup.py``, which installs nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.setenv("GNSFAST_CUDA", "0")
    return runpy.run_path("setup.py")


@pytest.mark.parametrize("release", [(12, 5), (12, 6), (13, 0)])
def test_nvcc_that_is_taken(
    release: tuple[int, int],
    tmp_path: Path,
    functions: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvcc = fake_nvcc(tmp_path, "{}.{}".format(*release))
    monkeypatch.setenv("GNSFAST_CUDA", "1")
    monkeypatch.setenv("CUDACXX", nvcc)
    assert functions["find_nvcc"]() == (nvcc, release)


@pytest.mark.parametrize(
    ("release", "asked", "wanted"),
    [
        ((13, 0), "", "sm_80 sm_90 sm_100 sm_120 compute_120"),
        ((12, 8), "", "sm_80 sm_90 sm_100 sm_120 compute_120"),
        ((12, 7), "", "sm_80 sm_90 compute_90"),
        ((12, 5), "90 80", "sm_80 sm_90 compute_90"),
        ((13, 0), "100;80,120 ", "sm_80 sm_100 sm_120 compute_120"),
        ((13, 0), "90", "sm_90 compute_90"),
    ],
)
def test_architectures(
    release: tuple[int, int],
    asked: str,
    wanted: str,
    functions: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hopper's own kernel is built with 90 and not without; what is left out is said."""
    monkeypatch.setenv("GNSFAST_CUDA_ARCHS", asked)
    units = functions["units"](functions["architectures"](release))
    hopper = units.pop("linear_wgrad_sm90.cu", "")
    assert hopper == (functions["HOPPER"] if "sm_90" in wanted else "")
    assert list(units) == ["linear_wgrad_sm80.cu", "token_sqnorms.cu", "finish.cu"]
    for flags in units.values():
        assert re.findall(r",code=(\w+)", flags) == wanted.split()
    told = "nvcc of CUDA 12.7 leaves out 100 and 120, which need CUDA 12.8"
    assert (told in capsys.readouterr().err) == (release == (12, 7))


@pytest.mark.parametrize("asked", ["", "0", "1"])
def test_only_benchmarks_build_the_variants(
    asked: str, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNSFAST_CUDA_VARIANTS", asked)
    built = functions["units"](["80", "90"])
    assert built.get("variants_sm90.cu", "") == (functions["HOPPER"] if asked == "1" else "")
    assert "variants_sm90.cu" not in functions["units"](["80"])


@pytest.mark.parametrize(
    ("release", "asked", "line"),
    [
        ("13.0", "80 70", "has no architecture 70: it takes 80, 90, 100, 120"),
        ("13.0", "9.0", "has no architecture 9.0: it takes 80, 90, 100, 120"),
        ("12.6", "90 100", "names 100, which nvcc of CUDA 12.6 cannot compile for"),
    ],
)
def test_architectures_that_are_refused(
    release: str, asked: str, line: str, tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path, release)
    done = setup(["setup.py", "--version"], CUDACXX=nvcc, GNSFAST_CUDA_ARCHS=asked)
    assert done.returncode != 0 and f"GNSFAST_CUDA_ARCHS {line}" in done.stderr


def test_ninja_on_the_path(tmp_path: Path) -> None:
    """``pip install --target`` puts the package's ninja where the package does not look."""
    pytest.importorskip("pybind11")
    nvcc = fake_nvcc(tmp_path, "13.0")
    (tmp_path / "ninja.py").write_text("BIN_DIR = '/nowhere'\n")
    nowhere = {"PYTHONPATH": str(tmp_path), "PATH": "/nowhere"}
    done = setup(["setup.py", "--version"], CUDACXX=nvcc, **nowhere)
    assert done.returncode != 0 and "no ninja in /nowhere or on the PATH" in done.stderr

    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\necho $* > {tmp_path}/called\nexit 1\n")
    ninja.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = setup(build_into(tmp_path), CUDACXX=nvcc, PYTHONPATH=str(tmp_path), PATH=path)
    assert done.returncode != 0 and (tmp_path / "called").read_text() == f"-C {tmp_path}\n"


WITHOUT_HOPPER = """\
#include "linear_wgrad.h"
namespace gnsfast {
Plan plan(int B, int T, int I, int O, int n) { return plan_tiles({8, 8, 1}, B, T, I, O, n); }
void launch(const LinearWgrad&, const Plan&) {}
const Registered sm80{{"sm80", plan, launch}};
void token_sqnorms(const TokenSqnorms&) {}
const char* missing_device() { return ""; }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_module_without_the_hopper_kernel(tmp_path: Path) -> None:
    """It loads, and says what it has not; the kernels beside it need no nvcc here."""
    pybind11 = pytest.importorskip("pybind11")
    stub = tmp_path / "stub.cpp"
    stub.write_text(WITHOUT_HOPPER)
    built = ["g++", "-std=c++17", "-O0", "-shared", "-fPIC", f"-I{pybind11.get_include()}"]
    built += [f"-I{sysconfig.get_path('include')}", f"-I{ROOT}/csrc", "-o", f"{tmp_path}/_C.so"]
    subprocess.run([*built, ROOT / "csrc" / "bindings.cpp", stub], check=True)
    code = "import _C; print(_C.kernels()); _C.plan_linear_wgrad({!r}, (1, 1, 8, 8), 132)"
    for name in ("sm90", "sm90 unsplit", "sm80"):
        run = [sys.executable, "-c", code.format(name)]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "['sm80']\n", done.stderr
        refused = f"this build has no kernel {name}: GNSFAST_CUDA_ARCHS=90 pip install . builds"
        assert (refused in done.stderr) == (done.returncode != 0) == (name != "sm80")

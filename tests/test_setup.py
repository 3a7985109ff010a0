# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` builds: with an nvcc, without, and with one that fails."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[1]

NO_NVCC = """\
import runpy, shutil, sys
shutil.which = lambda name: None
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


def setup(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "GNSFAST"))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=kept | environment,
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


def fake_nvcc(folder: Path, release: str) -> str:
    """Knows its version and compiles nothing."""
    nvcc = folder / "nvcc"
    answers = f"--version) echo release {release};; --dryrun) ;; *) exit 1;;"
    nvcc.write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    return str(nvcc)


def test_nvcc_that_fails(tmp_path: Path) -> None:
    """Never a silent installation without the kernels that were to be built."""
    pytest.importorskip("pybind11")
    nvcc = fake_nvcc(tmp_path, "13.0")
    built = ["setup.py", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    done = setup(built, CUDACXX=nvcc)
    assert done.returncode != 0 and "ninja" in done.stderr
    assert not list(tmp_path.rglob("_C*.so"))


def test_nvcc_that_is_too_old(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "12.4")
    done = setup(["setup.py", "--version"], CUDACXX=nvcc)
    assert done.returncode == 0 and "is of CUDA 12.4, older than 12.5" in done.stderr
    assert setup(["setup.py", "--version"], CUDACXX=nvcc, GNSFAST_CUDA="1").returncode != 0


def test_nvcc_that_is_not_there() -> None:
    done = setup(["setup.py", "--version"], CUDACXX="/nowhere/nvcc")
    assert done.returncode != 0 and "CUDACXX=/nowhere/nvcc does not run" in done.stderr

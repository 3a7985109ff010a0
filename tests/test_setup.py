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
import os, runpy, shutil, sys
shutil.which, access = lambda name: None, os.access
os.access = lambda path, mode: not str(path).endswith("nvcc") and access(path, mode)
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
        ("auto", False, "gnsfast: no nvcc, installing without the CUDA extension"),
        ("0", False, "gnsfast: GNSFAST_CUDA=0, installing without the CUDA extension"),
        ("1", True, "GNSFAST_CUDA=1, but there is no nvcc that runs"),
        ("yes", True, "GNSFAST_CUDA=yes: it must be 0, 1 or auto"),
    ],
)
def test_without_nvcc(wanted: str, fails: bool, line: str) -> None:
    done = setup(["-c", NO_NVCC], GNSFAST_CUDA=wanted)
    assert (done.returncode != 0) is fails
    assert line in done.stderr


def test_nvcc_that_fails(tmp_path: Path) -> None:
    """Never a silent installation without the kernels that were to be built."""
    pytest.importorskip("pybind11")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\ncase "$1" in --version|--dryrun) exit 0;; esac\nexit 1\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    built = ["setup.py", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    done = setup(built, CUDACXX=str(nvcc))
    assert done.returncode != 0 and "ninja" in done.stderr
    assert not list(tmp_path.rglob("_C*.so"))

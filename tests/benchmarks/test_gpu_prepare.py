# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu`` makes ready on a bare machine: packages, the kernels' folder, the extension."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks.machine import prepare as gpu_prepare  # noqa: E402
from benchmarks.machine.job import Job  # noqa: E402


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Of a checkout that is nearly empty."""
    for folder in ("gnsfast", "csrc/host_model", "triton_kernels"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root/csrc/a.cu").write_text("")
    return Job(tmp_path / "out", tmp_path / "results", 60, tmp_path / "root")


def test_wheels(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go before what is installed, but after the checkout; their programs are found."""
    about = "tiny_gpu-1.0.dist-info"
    files = {
        "setuptools.py": "",
        "triton_kernels/__init__.py": "",
        "tiny_gpu-1.0.data/platlib/in_platlib.py": "",
        "tiny_gpu-1.0.data/scripts/ninja": "#!/bin/sh\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-gpu\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(tmp_path / "tiny_gpu-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o100755 << 16
            wheel.writestr(member, text)
    monkeypatch.setattr(gpu_prepare, "NEEDED", ("json",))
    (job.root / "triton_kernels/__init__.py").touch()
    gpu_prepare.install(job, tmp_path, tmp_path / "site")
    asks = tmp_path / "asks.py"
    asks.write_text(
        "import setuptools, triton_kernels, in_platlib, shutil\n"
        "for module in (setuptools, triton_kernels, in_platlib): print(module.__file__)\n"
        "print(shutil.which('ninja'))\n"
    )
    assert gpu_prepare.output_lines(job, [sys.executable, str(asks)]) == [
        str(tmp_path / "site/setuptools.py"),
        str(job.root / "triton_kernels/__init__.py"),
        str(tmp_path / "site/in_platlib.py"),
        str(tmp_path / "site/bin/ninja"),
    ]


def test_wheels_that_are_downloaded_are_pinned() -> None:
    root = Path(__file__).parents[2]
    listed = (root / "Makefile").read_text().partition("GPU_WHEELS :=")[2].partition("\nINSTALL")[0]
    pins = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().split()}
    plain = lambda name: name.lower().replace("_", "-")
    assert {plain(n) for n in listed.split() if n != "\\"} <= {plain(pin) for pin in pins}


def test_what_is_missing_is_named(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_prepare, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match="missing here: no_such_package; .*`make gpu-wheels`"):
        gpu_prepare.install(job, tmp_path, tmp_path / "site")


def test_kernels_are_linked_where_nothing_is_installed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job.root / "gnsfast" / "triton_kernels"
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: None)
    gpu_prepare.link(job)
    assert not folder.exists()

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    gpu_prepare.link(job)
    gpu_prepare.link(job)
    assert folder.resolve() == job.root / "triton_kernels"


def test_link_is_ignored_by_git() -> None:
    root = Path(__file__).parents[2]
    names = ["gnsfast/triton_kernels", ".whl/a.whl", ".gpu/gpu.log"]
    run = ["git", "-c", "core.excludesFile=", "check-ignore", "--no-index", "-v", *names]
    said = subprocess.run(run, cwd=root, capture_output=True, text=True).stdout.splitlines()
    assert len(said) == 3 and all(line.startswith(".gitignore:") for line in said)


@pytest.fixture
def nvcc(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho release 13.0\n")
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    monkeypatch.setattr(gpu_prepare, "DEVICE", "print('9\\na device')")
    return path


def row(job: Job) -> dict[str, object]:
    """Of the one record."""
    (path,) = job.records.glob("*-gpu-extension.json")
    data = json.loads(path.read_text())
    assert data["machine"]["gpu"] == "a device"
    (found,) = data["tables"]["The CUDA extension"]
    return dict(found)


def write_setup(job: Job, status: int, content: str) -> None:
    (job.root / "setup.py").write_text(
        "import os, sys\n"
        "asked = {k: v for k, v in os.environ.items() if k.startswith('GNSFAST_CUDA')}\n"
        "assert list(map(asked.get, sorted(asked))) == ['1', '90', '1'], asked\n"
        f"if {status}: sys.exit({status})\n"
        f"open('gnsfast/_C.so', 'w').write('{content}')\n"
    )


def test_the_extension_is_built_once(job: Job, nvcc: Path) -> None:
    """Until a source or the compiler changes; what a former call left is taken."""
    extension = job.root / "gnsfast/_C.so"
    write_setup(job, 0, "one")
    gpu_prepare.build(job)
    assert extension.read_text() == "one" and row(job)["result"] == "built"
    extension.write_text("stale")
    (kept,) = job.results.glob("extension/*/_C.so")
    kept.write_text("kept")
    (job.root / "csrc/a.pyc").write_text("what Python leaves there")
    gpu_prepare.build(job)
    assert extension.read_text() == "kept" and row(job)["result"] == "built by a former call"
    for change in (job.root / "csrc/host_model/b.h", nvcc):
        change.write_text("#!/bin/sh\necho release 13.1\n")
        extension.write_text("stale")
        gpu_prepare.build(job)
        assert extension.read_text() == "one" and row(job)["result"] == "built"
        assert len(list(job.results.glob("extension/*/_C.so"))) == 1


def test_an_extension_that_is_not_built(
    job: Job, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row, and no file of other sources in its place."""
    (job.root / "gnsfast/_C.so").write_text("stale")
    write_setup(job, 3, "")
    gpu_prepare.build(job)
    assert not (job.root / "gnsfast/_C.so").exists()
    assert row(job)["exit status"] == 3 and "the build failed" in str(row(job)["result"])
    gpu_prepare.build(job)
    assert row(job)["exit status"] == 1 and "failed in a former call" in str(row(job)["result"])
    (job.root / "setup.py").write_text("import time; time.sleep(20)")
    monkeypatch.setattr(gpu_prepare, "BUILD_SECONDS", 0.1)
    gpu_prepare.build(job)
    said = row(job)
    assert "the build took too long" in str(said["result"]) and said["s"] < 10
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    gpu_prepare.build(job)
    assert "there is no nvcc at /nowhere/nvcc" in str(row(job)["result"])


def test_without_a_device(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prepare, "DEVICE", "raise RuntimeError('no driver')")
    with pytest.raises(SystemExit, match="torch finds no CUDA device: .*--rehearse runs on a CPU"):
        gpu_prepare.build(job)
    assert "no driver" in job.log.read_text()

# SPDX-License-Identifier: Apache-2.0
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_cases import SETS

from gnsfast.ops import cpu

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"
FLAGS = "-std=c++17 -O1 -ffp-contract=fast -fno-math-errno -Wno-psabi -fPIC -fvisibility=hidden"


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instructions", lambda: request.param)
    monkeypatch.setattr(cpu, "for_bfloat16", lambda: "")
    return str(request.param)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``gnsfast._cpu`` with the model of AMX."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    pybind11 = pytest.importorskip("pybind11")
    folder = tmp_path_factory.mktemp("model")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    sources = [path for path in CSRC.glob("*.cpp") if path.name != "check.cpp"]
    compile_all = [
        subprocess.Popen(
            ["g++", *FLAGS.split(), "-DGNSFAST_BFLOAT16", "-DGNSFAST_AMX_MODEL", *includes]
            + ["-c", str(path), "-o", str(folder / f"{path.stem}.o")]
        )
        for path in sources
    ]
    assert not any([each.wait() for each in compile_all])
    library = folder / "_cpu.so"
    objects = [str(folder / f"{path.stem}.o") for path in sources]
    subprocess.run(["g++", "-shared", "-o", str(library), *objects], check=True)
    spec = importlib.util.spec_from_file_location("model._cpu", library)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.bfloat16_kernels()[0] == "amx"
    return found


def taken(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For bfloat16 the kernel ``name``, or the model of it."""
    if "avx512" not in SETS:
        pytest.skip("no AVX-512")
    if name not in cpu._module().bfloat16_kernels():
        if name != "amx":
            pytest.skip(f"no {name}")
        model = request.getfixturevalue("model")
        monkeypatch.setattr(cpu, "_module", lambda: model)
    monkeypatch.setattr(cpu, "instructions", lambda: "avx512")
    monkeypatch.setattr(cpu, "for_bfloat16", lambda: name)


OF_BFLOAT16 = [
    pytest.param("amx", marks=[pytest.mark.slow, pytest.mark.source]),
    pytest.param("avx512_bf16", marks=pytest.mark.source),
]


@pytest.fixture(params=OF_BFLOAT16)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    taken(request.param, request, monkeypatch)
    return str(request.param)


@pytest.fixture(params=[*SETS, *OF_BFLOAT16])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What a kernel, each in turn, reads: float32 that of instructions, bfloat16 its own."""
    if request.param not in SETS:
        taken(request.param, request, monkeypatch)
        return torch.bfloat16
    monkeypatch.setattr(cpu, "instructions", lambda: request.param)
    monkeypatch.setattr(cpu, "for_bfloat16", lambda: "")
    return torch.float32


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as nvcc makes them, where there is one: no spilled register, no warning of a
serialised product, the instructions that were meant, within the committed budget.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
from proofs import proof

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import budget, compile_cuda, in_flight  # noqa: E402

pytestmark = pytest.mark.source

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")

NOTHING_SPILLED = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def compiled(source: str, arch: str, folder: Path) -> tuple[str, str]:
    """What ptxas says of a source for an architecture, and its machine code, without a spill."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    said, sass = compile_cuda.compiled(source, arch, folder)
    assert not re.search(r"\b(LDL|STL)\b", sass), "a register is spilled"
    return said, sass


def hold(said: str, sass: str, arch: str) -> None:
    """These kernels within the committed budget."""
    rows = compile_cuda.table(said, sass, arch)
    now = budget.Budget(compile_cuda.nvcc_version(), rows)
    if why := budget.hold("cuda", now, whole=False):
        pytest.skip(f"all else holds, but {why}")


def assert_fewer_stores(sass: str, count: int) -> None:
    """Norms alone have so many stores less than the kernel that stores half precision."""
    kernels = (part.partition(",") for part in sass.split(".section\t.text.")[1:])
    stores = {compile_cuda.demangled(k): len(re.findall(r"\bSTG", code)) for k, _, code in kernels}
    for name, alone in stores.items():
        if "Nothing" in name:
            element = "__half" if "__half" in name else "__nv_bfloat16"
            assert stores[name.replace("Nothing", element)] - alone == count, stores


@proof
@nvcc
@pytest.mark.parametrize("instance", compile_cuda.INSTANCES, ids=" ".join)
def test_sm90(instance: tuple[str, str, str], tmp_path: Path) -> None:
    said, sass = compiled(compile_cuda.sm90_source(instance), "90a", tmp_path)
    assert "C75" not in said, said
    assert said.count(NOTHING_SPILLED) == 1, said
    assert re.findall(r"Used (\d+) registers", said) == ["168"], said  # at entry

    kernel = next(p for p in sass.split(".section\t.text.") if "linear_wgrad_kernel" in p[:200])
    width, cluster = re.findall(r"\d+", instance[2])
    products = re.findall(rf"HGMMA\.64x{width}x16\.F32(\.BF16)?[^;]*;", kernel)
    turned = re.findall(rf"HGMMA\.64x{width}x16[^;]*tnspA[^;]*tnspB", kernel)
    assert len(products) == len(turned) == 4, "one product for 16 of a block's 64 tokens"
    assert bool(products[0]) == (instance[0] == "__nv_bfloat16")
    if instance[1] == "gnsfast::Nothing":  # parts of a tile for the scratch, 48 pairs, and norms
        assert len(re.findall(r"\bSTG", kernel)) < 2 * 48 and len(re.findall(r"\bRED", kernel)) < 48
    assert "UTMALDG.3D" in kernel and ("MULTICAST" in kernel) == (cluster == "2")
    # 40 registers for the producer, 232 for the consumers; no fence of all memory in the loop.
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x28", kernel)
    assert re.search(r"USETMAXREG\.TRY_ALLOC[^;]*0xe8", kernel)
    assert "MEMBAR" not in kernel[kernel.index("HGMMA") : kernel.rindex("HGMMA")]
    assert not in_flight.touched(sass)
    assert in_flight.touched(in_flight.without_waits(sass)), "no wait is missed"
    hold(said, sass, "90a")


@proof
@nvcc
@pytest.mark.parametrize("arch", compile_cuda.GENERIC_ARCHITECTURES)
def test_sm80(arch: str, tmp_path: Path) -> None:
    """The generic kernel on every architecture that it is built for: 32 x 2 products a stage."""
    said, sass = compiled(compile_cuda.generic_source(), arch, tmp_path)
    assert said.count(NOTHING_SPILLED) == 6, said
    assert all(int(n) < 256 for n in re.findall(r"Used (\d+) registers", said))
    assert len(re.findall(r"\bHMMA\.16816", sass)) == 6 * 32
    assert_fewer_stores(sass, 32)  # pairs of a thread's tile
    assert re.search(r"\bLDSM\.16\.MT88\.4", sass) and re.search(r"\bLDGSTS", sass)
    hold(said, sass, arch)


@proof
@nvcc
@pytest.mark.parametrize("arch", compile_cuda.SIMT_ARCHITECTURES)
def test_token_sqnorms(arch: str, tmp_path: Path) -> None:
    """Rows are read 16 bytes at a time, several loads in flight."""
    said, sass = compiled(compile_cuda.TOKEN_SQNORMS, arch, tmp_path)
    assert said.count(NOTHING_SPILLED) == 2, said
    loads = re.findall(r"\bLDG\S*", sass)
    assert len(loads) >= 8 and all(".128" in load for load in loads)
    hold(said, sass, arch)


@proof
@nvcc
@pytest.mark.parametrize("arch", compile_cuda.SIMT_ARCHITECTURES)
def test_finish(arch: str, tmp_path: Path) -> None:
    """Four blocks to a multiprocessor, several loads in flight, fences of all memory around every
    arrival. What other blocks stored is loaded from L2.
    """
    said, sass = compiled(compile_cuda.FINISH, arch, tmp_path)
    assert said.count(NOTHING_SPILLED) == 6, said
    assert_fewer_stores(sass, 8 + 1)  # pairs of cut tiles, db
    assert all(int(n) <= 64 for n in re.findall(r"Used (\d+) registers", said))
    for kernel in sass.split(".section\t.text.")[1:]:
        order = re.findall(r"\bMEMBAR|\bATOMG\.E\.ADD\.STRONG", kernel)
        assert order == ["MEMBAR", "ATOMG.E.ADD.STRONG", "MEMBAR"] * 4
        of_dy = re.findall(r"\bLDG\S*\.128\.CONSTANT", kernel)
        of_others = re.findall(r"\bLDG\S*STRONG\.GPU", kernel)
        assert len(of_dy) >= 8 and len(of_others) >= 32
    hold(said, sass, arch)


def test_generated_products_are_up_to_date() -> None:
    sys.path.insert(0, str(compile_cuda.CSRC))
    try:
        import generate_wgmma
    finally:
        sys.path.remove(str(compile_cuda.CSRC))
    assert generate_wgmma.text() == (compile_cuda.CSRC / "wgmma_sm90.cuh").read_text(
        encoding="utf-8"
    )

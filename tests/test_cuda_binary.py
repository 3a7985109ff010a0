# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as nvcc makes them, where there is one: no spilled register, no warning of a
serialised product, the instructions that were meant.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"

pytestmark = pytest.mark.source

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")

NOTHING_SPILLED = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"

STANDARD = "Variant<192, 2, true, true>"
INSTANCES = [
    ("__nv_bfloat16", "float", STANDARD),
    ("__nv_bfloat16", "__nv_bfloat16", STANDARD),
    ("__half", "float", STANDARD),
    ("__half", "__half", STANDARD),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<192, 2, false, true>"),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<192, 1, true, true>"),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<256, 2, true, false>"),
]


def source(instance: tuple[str, str, str]) -> str:
    element, output, variant = instance
    return f"""
#include "linear_wgrad_sm90.cuh"
template __global__ void gnsfast::linear_wgrad_kernel<{element}, {output}, gnsfast::{variant}>(
    const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, {output}*,
    const __grid_constant__ gnsfast::Problem);
template __global__ void gnsfast::merge_kernel<{output}, gnsfast::{variant}>(
    {output}*, const __grid_constant__ gnsfast::Problem);
"""


def compiled(unit: Path, arch: str) -> tuple[str, str]:
    """What ptxas says of a file for an architecture, and its machine code."""
    triton = pytest.importorskip("triton", reason="triton is there on Linux alone")
    binary = unit.with_suffix(".cubin")
    run = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-cubin"]
    run += ["-Xptxas", "-v", "-I", str(CSRC), "-o", str(binary), str(unit)]
    done = subprocess.run(run, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "warning" not in said, said
    # The wheel of Triton carries the disassembler.
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    read = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True)
    assert not re.search(r"\b(LDL|STL)\b", read.stdout), "a register is spilled"
    return said, read.stdout


@nvcc
@pytest.mark.parametrize("instance", INSTANCES, ids=" ".join)
def test_sm90(instance: tuple[str, str, str], tmp_path: Path) -> None:
    unit = tmp_path / "unit.cu"
    unit.write_text(source(instance), encoding="utf-8")
    said, sass = compiled(unit, "90a")
    assert "C75" not in said, said
    assert said.count(NOTHING_SPILLED) == 2, said
    assert re.findall(r"Used (\d+) registers", said).count("168") == 1, said  # at entry

    kernel = next(p for p in sass.split(".section\t.text.") if "linear_wgrad_kernel" in p[:200])
    width, cluster = re.findall(r"\d+", instance[2])
    products = re.findall(rf"HGMMA\.64x{width}x16\.F32(\.BF16)?[^;]*;", kernel)
    turned = re.findall(rf"HGMMA\.64x{width}x16[^;]*tnspA[^;]*tnspB", kernel)
    assert len(products) == len(turned) == 4, "one product for 16 of a block's 64 tokens"
    assert bool(products[0]) == (instance[0] == "__nv_bfloat16")
    assert "UTMALDG.3D" in kernel and ("MULTICAST" in kernel) == (cluster == "2")
    # 40 registers for the producer, 232 for the consumers; no fence of all memory in the loop.
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x28", kernel)
    assert re.search(r"USETMAXREG\.TRY_ALLOC[^;]*0xe8", kernel)
    assert "MEMBAR" not in kernel[kernel.index("HGMMA") : kernel.rindex("HGMMA")]


@nvcc
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_sm80(arch: str, tmp_path: Path) -> None:
    """The generic kernel on every architecture that it is built for: 32 x 2 products a stage."""
    unit = tmp_path / "unit.cu"
    pairs = [(e, o) for e in ("__nv_bfloat16", "__half") for o in ("float", e)]
    operand = "const __grid_constant__ gnsfast::Operand"
    unit.write_text(
        '#include "linear_wgrad_sm80.cuh"\n'
        + "".join(
            f"template __global__ void gnsfast::linear_wgrad_kernel<{element}, {output}>("
            f"{operand}, {operand}, {output}*, const __grid_constant__ gnsfast::Problem);\n"
            for element, output in pairs
        ),
        encoding="utf-8",
    )
    said, sass = compiled(unit, arch)
    assert said.count(NOTHING_SPILLED) == 4, said
    assert all(int(n) < 256 for n in re.findall(r"Used (\d+) registers", said))
    assert len(re.findall(r"\bHMMA\.16816", sass)) == 4 * 32
    assert re.search(r"\bLDSM\.16\.MT88\.4", sass) and re.search(r"\bLDGSTS", sass)


@nvcc
@pytest.mark.parametrize("arch", ["80", "120"])
def test_token_sqnorms(arch: str, tmp_path: Path) -> None:
    """Rows are read 16 bytes at a time, several loads in flight."""
    unit = shutil.copy(CSRC / "token_sqnorms.cu", tmp_path)
    said, sass = compiled(Path(unit), arch)
    assert said.count(NOTHING_SPILLED) == 2, said
    loads = re.findall(r"\bLDG\S*", sass)
    assert len(loads) >= 8 and all(".128" in load for load in loads)


def test_generated_products_are_up_to_date() -> None:
    sys.path.insert(0, str(CSRC))
    try:
        import generate_wgmma
    finally:
        sys.path.remove(str(CSRC))
    assert generate_wgmma.text() == (CSRC / "wgmma_sm90.cuh").read_text(encoding="utf-8")

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

INSTANCES = [
    ("__nv_bfloat16", "float", 2, "true"),
    ("__nv_bfloat16", "__nv_bfloat16", 2, "true"),
    ("__half", "float", 2, "true"),
    ("__half", "__half", 2, "true"),
    ("__nv_bfloat16", "float", 2, "false"),
    ("__nv_bfloat16", "float", 1, "true"),
]


def source(instance: tuple[str, str, int, str]) -> str:
    element, output, cluster, ordered = instance
    return f"""
#include "linear_wgrad_sm90.cuh"
template __global__ void gnsfast::linear_wgrad_kernel<{element}, {output}, {cluster}, {ordered}>(
    const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, {output}*,
    const __grid_constant__ gnsfast::Problem);
template __global__ void gnsfast::merge_kernel<{output}, {cluster}>(
    {output}*, const __grid_constant__ gnsfast::Problem);
"""


@nvcc
@pytest.mark.parametrize("instance", INSTANCES, ids=lambda i: " ".join(map(str, i)))
def test_sm90(instance: tuple[str, str, int, str], tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="triton is there on Linux alone")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    unit, binary = tmp_path / "unit.cu", tmp_path / "unit.cubin"
    unit.write_text(source(instance), encoding="utf-8")
    run = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
    run += ["-Xptxas", "-v", "-I", str(CSRC), "-o", str(binary), str(unit)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "C75" not in said and "warning" not in said, said
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2, said
    assert re.findall(r"Used (\d+) registers", said).count("168") == 1, said  # at entry

    sass = subprocess.run(
        [tools / "nvdisasm", binary], capture_output=True, text=True, check=True
    ).stdout
    kernel = next(p for p in sass.split(".section\t.text.") if "linear_wgrad_kernel" in p[:200])
    products = re.findall(r"HGMMA\.64x192x16\.F32(\.BF16)?[^;]*;", kernel)
    turned = re.findall(r"HGMMA\.64x192x16[^;]*tnspA[^;]*tnspB", kernel)
    assert len(products) == len(turned) == 4, "one product for 16 of a block's 64 tokens"
    assert bool(products[0]) == (instance[0] == "__nv_bfloat16")
    assert not re.search(r"\b(LDL|STL)\b", kernel) and "UTMALDG.3D" in kernel
    assert ("MULTICAST" in kernel) == (instance[2] > 1)
    # 40 registers for the producer, 232 for the consumers; no fence of all memory in the loop.
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x28", kernel)
    assert re.search(r"USETMAXREG\.TRY_ALLOC[^;]*0xe8", kernel)
    assert "MEMBAR" not in kernel[kernel.index("HGMMA") : kernel.rindex("HGMMA")]


@nvcc
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_sm80(arch: str, tmp_path: Path) -> None:
    """The generic kernel on every architecture that it is built for: 32 x 2 products a stage."""
    triton = pytest.importorskip("triton", reason="triton is there on Linux alone")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    unit, binary = tmp_path / "unit.cu", tmp_path / "unit.cubin"
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
    run = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-cubin"]
    run += ["-Xptxas", "-v", "-I", str(CSRC), "-o", str(binary), str(unit)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "warning" not in said, said
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 4, said
    assert all(int(n) < 256 for n in re.findall(r"Used (\d+) registers", said))
    sass = subprocess.run(
        [tools / "nvdisasm", binary], capture_output=True, text=True, check=True
    ).stdout
    assert len(re.findall(r"\bHMMA\.16816", sass)) == 4 * 32
    assert re.search(r"\bLDSM\.16\.MT88\.4", sass) and re.search(r"\bLDGSTS", sass)
    assert not re.search(r"\b(LDL|STL)\b", sass)


def test_generated_products_are_up_to_date() -> None:
    sys.path.insert(0, str(CSRC))
    try:
        import generate_wgmma
    finally:
        sys.path.remove(str(CSRC))
    assert generate_wgmma.text() == (CSRC / "wgmma_sm90.cuh").read_text(encoding="utf-8")

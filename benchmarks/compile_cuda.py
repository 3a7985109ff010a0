# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernels with nvcc for GPUs that need not be there, and reads the machine code:
``python -m benchmarks.compile_cuda`` prints the version of nvcc, then a JSON object of each unit's
kernels.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"

STANDARD = "Variant<192, 2, true, true>"
INSTANCES = [
    ("__nv_bfloat16", "float", STANDARD),
    ("__nv_bfloat16", "__nv_bfloat16", STANDARD),
    ("__half", "float", STANDARD),
    ("__half", "__half", STANDARD),
    ("__nv_bfloat16", "gnsfast::Nothing", STANDARD),
    ("__half", "gnsfast::Nothing", STANDARD),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<192, 2, false, true>"),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<192, 1, true, true>"),
    ("__nv_bfloat16", "__nv_bfloat16", "Variant<256, 2, true, false>"),
]
GENERIC_ARCHITECTURES = ("80", "90", "100", "120")
TOKEN_SQNORMS = '#include "token_sqnorms.cu"\n'
FINISH = '#include "finish.cu"\n'
SIMT_ARCHITECTURES = ("80", "120")


def sm90_source(instance: tuple[str, str, str]) -> str:
    element, output, variant = instance
    return f"""
#include "linear_wgrad_sm90.cuh"
template __global__ void gnsfast::linear_wgrad_kernel<{element}, {output}, gnsfast::{variant}>(
    const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, {output}*,
    const __grid_constant__ gnsfast::Problem);
"""


def generic_source() -> str:
    outputs = ("float", "{}", "gnsfast::Nothing")
    pairs = [(e, o.format(e)) for e in ("__nv_bfloat16", "__half") for o in outputs]
    operand = "const __grid_constant__ gnsfast::Operand"
    return '#include "linear_wgrad_sm80.cuh"\n' + "".join(
        f"template __global__ void gnsfast::linear_wgrad_kernel<{element}, {output}>("
        f"{operand}, {operand}, {output}*, const __grid_constant__ gnsfast::Problem);\n"
        for element, output in pairs
    )


def units() -> list[tuple[str, str]]:
    """Every source with an architecture that it is compiled for."""
    return [
        *((sm90_source(instance), "90a") for instance in INSTANCES),
        *((generic_source(), arch) for arch in GENERIC_ARCHITECTURES),
        *((source, arch) for source in (TOKEN_SQNORMS, FINISH) for arch in SIMT_ARCHITECTURES),
    ]


def nvcc_version() -> dict[str, str]:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return {"nvcc": re.findall(r"\bV([\d.]+)", said)[0]}


def compiled(source: str, arch: str, folder: Path) -> tuple[str, str]:
    """What ptxas says of a source for an architecture, and its machine code."""
    import triton  # its wheel carries the disassembler

    unit, binary = folder / "unit.cu", folder / "unit.cubin"
    unit.write_text(source, encoding="utf-8")
    run = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-cubin"]
    run += ["-Xptxas", "-v", "-I", str(CSRC), "-o", str(binary), str(unit)]
    done = subprocess.run(run, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "warning" not in said, said
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    read = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True)
    return said, read.stdout


def table(said: str, sass: str, arch: str) -> dict[str, dict[str, int]]:
    """Each kernel's registers, spilled bytes and instructions; shared memory is asked for at
    launch.
    """
    rows = {}
    for part in said.split("Function properties for ")[1:]:
        mangled = part.split()[0]
        code = sass.split(f".section\t.text.{mangled},")[1].split(".section\t")[0]
        numbers = {
            "registers": r"Used (\d+) registers",
            "spilled": r"(\d+) bytes stack frame",
        }
        rows[f"{demangled(mangled)}, sm_{arch}"] = {
            **{k: int(re.findall(pattern, part)[0]) for k, pattern in numbers.items()},
            "instructions": instructions(code),
        }
    return rows


def demangled(name: str) -> str:
    """Without its arguments and namespaces."""
    run = ["c++filt", name]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    kernel = text.rpartition("(")[0].removeprefix("void ")
    return kernel.replace("gnsfast::", "").replace("(anonymous namespace)::", "")


def instructions(sass: str) -> int:
    """Lines of a disassembly that do something: the ends of functions are filled up with NOP."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", sass, re.MULTILINE))


if __name__ == "__main__":
    print(json.dumps(nvcc_version()))
    with tempfile.TemporaryDirectory() as folder:
        for source, arch in units():
            print(json.dumps(table(*compiled(source, arch, Path(folder)), arch)), flush=True)

# SPDX-License-Identifier: Apache-2.0
"""What ``compile_kernels.py`` reads in the machine code of a kernel."""

import re
import subprocess
import tempfile
from typing import Any

from benchmarks import in_flight
from benchmarks.compile_cuda import instructions
from benchmarks.no_gpu import TOOLS, Device

INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "FFMA", "UTMALDG", "LDGSTS", "STL", "LDL")

STEP = re.compile(
    r"\b(?:(cp\.async\.wait_group)|(fence\.proxy\.async)|tcgen05\.mma|wgmma\.mma_async)\b"
)


def read_cubin(compiled: Any, device: Device) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = tool("nvdisasm", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return {
        "registers": registers,
        "stack": stack,
        "blocks": resident(device.target.arch, warps, registers, shared),
        "instructions": instructions(sass),
        "in_flight": len(re.findall(r"DEPBAR\.LE gsb0, 0x1", sass)),
        "touched": in_flight.touched(sass),
        "unfenced": unfenced(compiled.asm["ptx"]),
        "stores": len(re.findall(r"\bst\.global\b", compiled.asm["ptx"])),
        "noticed": len(in_flight.touched(in_flight.without_waits(sass))),
        **{name: len(re.findall(rf"\b{name}\b", sass)) for name in INSTRUCTIONS},
    }


def read_amdgcn(compiled: Any, device: Device) -> dict[str, Any]:
    """The stack also holds what is spilled."""
    text = compiled.asm["amdgcn"]
    keys = {"registers": "vgpr_count", "stack": "private_segment_fixed_size"}
    return {
        **{name: int(re.findall(rf"\.{key}: +(\d+)", text)[0]) for name, key in keys.items()},
        "instructions": len(re.findall(r"^\t[a-z]\w+", text, re.MULTILINE)),
        "unordered": unordered(text),
        "MFMA": len(re.findall(r"\bv_mfma_", text)),
    }


def unfenced(ptx: str) -> list[str]:
    """The products after a wait for copies, without a fence between them in the order of lines."""
    found, waited = [], False
    for line in ptx.splitlines():
        if step := STEP.search(line):
            if step[1] or step[2]:
                waited = bool(step[1])
            elif waited:
                found.append(line.strip())
    return found


def unordered(amdgcn: str) -> int:
    """Arrivals (``finish.arrives_last``) before which warps have not waited for their stores."""
    found, barrier, pending = 0, False, False
    for name in re.findall(
        r"^\s*(s_waitcnt vmcnt\(0\)|s_barrier|\w+_(?:store|atomic)_\w+)", amdgcn, re.M
    ):
        if "_atomic_" in name:
            found += barrier
        elif name == "s_barrier":
            barrier = pending
        else:
            pending = "store" in name
    return found


def cut_off(ttir: str) -> bool:
    """Whether a product has an operand that was not rounded to tf32 right before."""
    rounded = set(re.findall(r'(%\S+) = tt\.elementwise_inline_asm "cvt\.rna\.tf32\.f32', ttir))
    products = re.findall(r"tt\.dot (%\w+), (%\w+),", ttir)
    return not products or any(not set(operands) <= rounded for operands in products)


def resident(capability: int, warps: int, registers: int, shared: int) -> int:
    """Blocks that one SM has room for, by registers (65,536, given out in eights), warps (64) and
    shared memory, of which each block takes 1 KiB for itself.
    """
    room = ((164 if capability == 80 else 228) << 10) // (shared + 1024)
    return min(32, 64 // warps, 65536 // (warps * 32 * 8 * -(-registers // 8)), room)


def tool(name: str, *args: str) -> str:
    return subprocess.run(
        [str(TOOLS / name), *args], capture_output=True, text=True, check=True
    ).stdout

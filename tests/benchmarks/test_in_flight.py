# SPDX-License-Identifier: Apache-2.0
"""The check of machine code for registers of products in flight: planted faults, each noticed."""

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import in_flight  # noqa: E402

pytestmark = pytest.mark.source

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8].tnspA.tnspB, R24, gsb0"
OF_REGISTERS = "HGMMA.64x64x8.F32.TF32 R24, R60, gdesc[UR4], R24, gsb0"
OTHER = "HGMMA.64x64x8.F32.TF32 R64, R52, gdesc[UR4], R64, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"

# Products write R24 to R55. A loop issues them and waits for all but the last; its end squares.
RIGHT = f"""
.L_x_1:
WARPGROUP.ARRIVE
{PRODUCT}
WARPGROUP.DEPBAR.LE gsb0, 0x1
IADD3 R56, R56, 0x1, RZ
@P0 BRA `(.L_x_2)
BRA `(.L_x_1)
.L_x_2:
{WAIT}
FADD R2, R24, R3
@P1 BRA `(.L_x_1)
STG.E.128 desc[UR4][R6.64], R52
EXIT
"""


END = ["FADD R2, R24, R3", "STG.E.128 desc[UR4][R6.64], R52"]


def text(code: str, name: str = "kernel") -> str:
    """As ``nvdisasm`` prints it."""
    lines = [
        line if line.startswith(".L") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(code.split("\n"))
        if line
    ]
    section = f'\t.section\t.text.{name},"ax",@progbits\n'
    return section + "\n".join(lines) + '\n\t.section\t.debug,"",@progbits\n'


def instead(line: str) -> str:
    """The right code with another line in the place of what is issued beside the products."""
    return RIGHT.replace("IADD3 R56, R56, 0x1, RZ", line)


def test_right_code() -> None:
    assert in_flight.touched(text(RIGHT)) == []


FAULTS = {
    "no wait": (RIGHT.replace(f"{WAIT}\n", ""), END),
    "a wait for all but one": (RIGHT.replace(WAIT, "WARPGROUP.DEPBAR.LE gsb0, 0x1"), END),
    "a wait on one path alone": (
        RIGHT.replace(f".L_x_2:\n{WAIT}", f"@P2 BRA `(.L_x_2)\n{WAIT}\n.L_x_2:"),
        END,
    ),
    "past the wait, where threads meet": (
        RIGHT.replace(
            f".L_x_2:\n{WAIT}", f".L_x_2:\nBSSY B0, `(.L_x_3)\nBSYNC B0\n{WAIT}\n.L_x_3:"
        ),
        END,
    ),
    "read in the next round": (
        RIGHT.replace(".L_x_1:\n", ".L_x_1:\nSEL R4, R55, RZ, P3\n"),
        ["SEL R4, R55, RZ, P3"],
    ),
    "overwritten": (
        instead("CS2R R54, SRZ"),
        ["CS2R R54, SRZ"],
    ),
    "a wide load": (
        instead("@!P4 LDS.128 R20, [R57]\nLDS.128 R21, [R57]"),
        ["LDS.128 R21, [R57]"],
    ),
    "an address": (
        instead("STG.E desc[UR4][R23.64], R2"),
        ["STG.E desc[UR4][R23.64], R2"],
    ),
    "a factor in a register": (
        RIGHT.replace(PRODUCT, OF_REGISTERS).replace("R56, R56", "R63, R62"),
        ["IADD3 R63, R62, 0x1, RZ"],
    ),
    "a factor that is being written": (
        instead(OTHER),
        [PRODUCT, OTHER],
    ),
    "in the second kernel": (RIGHT.replace(f"{WAIT}\n", ""), END),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name: str) -> None:
    code, found = FAULTS[name]
    before = text(RIGHT, "first") if "second" in name else ""
    assert in_flight.touched(before + text(code)) == found


def test_factors_may_be_read() -> None:
    code = RIGHT.replace(PRODUCT, OF_REGISTERS).replace("R56, R56", "R56, R62")
    assert in_flight.touched(text(code)) == []


def test_factors_of_a_wide_product() -> None:
    """R23 is 32 bits of it, without R24; the sum is 64 bits wide, and so is what is added."""
    for other, found in (("R2, R16, R23, RZ", 0), ("R22, R16, R2, R54", 1), ("R23, R2, R3, RZ", 1)):
        code = instead(f"IMAD.WIDE.U32 {other}")
        assert len(in_flight.touched(text(code))) == found, other


def test_without_waits() -> None:
    """What shows that a kernel's check would notice anything."""
    assert in_flight.touched(in_flight.without_waits(text(RIGHT))) == END


def test_unknown_jump() -> None:
    with pytest.raises(ValueError, match="where does this go"):
        in_flight.touched(text(RIGHT.replace("BRA `(.L_x_1)", "BRX R4 -0x10")))

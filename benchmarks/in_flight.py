# SPDX-License-Identifier: Apache-2.0
"""Reads the machine code of Hopper kernels: whether an instruction touches registers that a matrix
product in flight (HGMMA) still writes, or overwrites those that it still reads.

A product is in flight from its issue to the wait for all of them, ``WARPGROUP.DEPBAR.LE gsb0,
0x0``. Until then its accumulator may be named by further products alone. Nothing in the hardware
holds other instructions back, and Triton's own intermediate form names accumulators too early: it
is LLVM that moves these instructions behind the wait.
"""

import re
from typing import NamedTuple

WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.F32\S* R(\d+), (?:R(\d+), )?")
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+) )?([^;]*?)\s*;")
LABEL = re.compile(r"(\.L_\w+):")
TARGET = re.compile(r"\((\.L_\w+)\)")
REGISTER = re.compile(r"(?<![\w.])[-|~!]*R(\d+)\b")
ADDRESS = re.compile(r"\[[^]]*\]")
FACTORS = 4
"""Registers of a thread that hold the left factor of a product, where it is not in shared memory:
64 rows of 32 bytes, for 128 threads."""

UNKNOWN = ("BRX", "JMX", "JMP")


class Instruction(NamedTuple):
    text: str
    conditional: bool
    label: str = ""  # of a place in the code, without an instruction

    @property
    def name(self) -> str:
        return self.text.split(" ")[0].split(".")[0]


class Flight(NamedTuple):
    """Registers that products in flight write, and those that they read."""

    written: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()

    def __or__(self, other: "Flight") -> "Flight":  # type: ignore[override]
        return Flight(self.written | other.written, self.read | other.read)


def touched(sass: str) -> list[str]:
    """The instructions of all kernels in ``nvdisasm``'s text that touch what is in flight."""
    kernels = [code for code in sass.split(".section\t.text.")[1:] if "HGMMA" in code]
    return [text for code in kernels for text in _touched(code)]


def without_waits(sass: str) -> str:
    """The same code without its waits for products: what a check of it has to notice."""
    return WAIT.sub("NOP", sass)


def _touched(code: str) -> list[str]:
    lines = map(_instruction, code.partition("\t.section\t")[0].splitlines())
    listing = [line for line in lines if line is not None]
    places = {line.label: i for i, line in enumerate(listing) if line.label}
    before = {0: Flight()}
    todo = [0] if listing else []
    while todo:
        i = todo.pop()
        after = _after(listing[i], before[i])
        for k in _next(listing, i, places):
            known = before.get(k)
            joined = after if known is None else known | after
            if joined != known:
                before[k] = joined
                todo.append(k)
    found = [(i, _faulty(listing[i], flight)) for i, flight in before.items()]
    return [listing[i].text for i, faulty in sorted(found) if faulty]


def _instruction(line: str) -> Instruction | None:
    if label := LABEL.match(line.strip()):
        return Instruction("", False, label[1])
    if found := LINE.search(line):
        return Instruction(found[2], found[1] is not None)
    return None


def _next(listing: list[Instruction], i: int, places: dict[str, int]) -> list[int]:
    """Where the code may go on. What is called (a division) has neither products nor waits."""
    line, following = listing[i], [i + 1] * (i + 1 < len(listing))
    if line.name in UNKNOWN:
        raise ValueError(f"where does this go? {line.text}")
    if line.name in ("EXIT", "RET"):
        return following if line.conditional else []
    if line.name in ("BRA", "CALL"):
        branch = [places[TARGET.search(line.text)[1]]]  # type: ignore[index]
        may_pass = line.conditional or "CALL" in line.text or "," in line.text.partition("`")[0]
        return branch + following if may_pass else branch
    if line.name == "BSYNC":  # threads meet there, and go on where the barrier was set up for
        barrier = f"BSSY {line.text.split()[1]},"
        own = [each.text for each in listing[:i] if each.text.startswith(barrier)][-1:]
        return following + [places[TARGET.search(text)[1]] for text in own]  # type: ignore[index]
    return following


def _after(line: Instruction, flight: Flight) -> Flight:
    if product := PRODUCT.match(line.text):
        return flight | _of_product(product)
    return Flight() if WAIT.match(line.text) else flight


def _of_product(product: re.Match[str]) -> Flight:
    width, accumulator, factor = product.groups()
    read = frozenset() if factor is None else _registers(int(factor), FACTORS)
    return Flight(_registers(int(accumulator), int(width) // 2), read)


def _faulty(line: Instruction, flight: Flight) -> bool:
    if not flight.written or line.label:
        return False
    if product := PRODUCT.match(line.text):
        own = _of_product(product)
        return bool(own.written & flight.read or own.read & flight.written)
    operands = _operands(line)
    results = operands[:1] if _has_result(line) else []
    named = frozenset().union(*operands)
    return bool(named & flight.written or frozenset().union(*results) & flight.read)


def _operands(line: Instruction) -> list[frozenset[int]]:
    """The registers of each operand, the result first. An operand may be wider than one register,
    by the name of the instruction; an address is 64 bits if it says so.
    """
    found = []
    for address in ADDRESS.findall(line.text):
        for r in re.finditer(r"(?<!U)R(\d+)(\.64)?", address):
            found.append(_registers(int(r[1]), 2 if r[2] else 1))
    opcode, _, rest = line.text.partition(" ")
    places = ADDRESS.sub("", rest).split(",")
    factors = places[1:-1] if ".WIDE" in opcode else []  # of 32 bits each
    values = []
    for place in places:
        width = 1 if place in factors else _width(opcode)
        values += [_registers(int(r), width) for r in REGISTER.findall(place)]
    return values + found


def _width(opcode: str) -> int:
    if re.search(r"\.128\b", opcode) or re.match(r"LDSM.*\.4\b|HMMA\.", opcode):
        return 4
    wide = r"\.(64|WIDE|F64|2)\b|^(DADD|DMUL|DFMA|DSETP|CS2R$)"
    return 2 if re.search(wide, opcode) else 1


def _has_result(line: Instruction) -> bool:
    """Whether the first register that is not an address is written."""
    return not re.match(r"ST|RED|LDGSTS|UTMA|SYNCS|R2UR|R2P|BAR|\w*SETP", line.text)


def _registers(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))

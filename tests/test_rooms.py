# SPDX-License-Identifier: Apache-2.0
"""Imports run downwards, room by room; ``python tests/test_rooms.py`` prints the arrows."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "gnsfast"
FILES = (
    "arguments combinations counts eager errors guard interval kept reasons signatures "
    "templates tensors"
)
FLOORS = (
    (*FILES.split(), "torch_internals"),
    ("reference", "parallel"),
    ("ops", "noise_scale"),
    ("functional",),
    ("layers", "following"),
    ("table",),
    ("probing",),
    ("estimator", "configure"),
    ("critical_batch",),
    ("integrations",),
    ("cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS, 1) for room in rooms}
OPEN = {"integrations", "cli"}
"""Rooms whose files are imported by themselves: each needs a framework that may not be there."""


class Arrow(NamedTuple):
    """``file`` of ``room`` imports ``name`` from ``module``, which is in the room ``of``."""

    file: str
    room: str
    of: str
    module: str
    name: str


def sources() -> list[Path]:
    return [p for p in PACKAGE.rglob("*.py") if "triton_kernels" not in p.parts]


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module's name below ``gnsfast``; empty for the top itself."""
    return parts[0].removesuffix(".py") if parts and parts[0] != "__init__.py" else ""


def arrows() -> Iterator[Arrow]:
    for path in sources():
        file = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gnsfast"):
                below = tuple((node.module or "").split(".")[1:])
                for name in (alias.name for alias in node.names):
                    of = room_of(below) or (name if name in FLOOR else "")
                    yield Arrow(str(file), room_of(file.parts), of, ".".join(below), name)


def test_every_file_is_in_a_room() -> None:
    rooms = {room_of(p.relative_to(PACKAGE).parts) for p in sources()}
    assert rooms == {*FLOOR, ""}


def test_imports_run_downwards() -> None:
    up = [
        a
        for a in arrows()
        if a.room and a.of and a.of != a.room and FLOOR[a.of] >= max(FLOOR[a.room], 2)
    ]
    assert not up, up


def test_rooms_are_entered_by_their_door() -> None:
    """Others import from a room's ``__init__``, which exports it, and no private name."""
    inside = [
        a
        for a in arrows()
        if a.of
        and a.of not in OPEN
        and a.room != a.of
        and FLOOR[a.of] > 1
        and (a.name.startswith("_") or a.module.count(".") > (a.of == "critical_batch"))
    ]
    assert not inside, inside


def test_no_circle() -> None:
    """Among files too: none reaches itself."""
    below: dict[str, set[str]] = {}
    for path in sources():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        below[name] = set()
    for a in arrows():
        own = a.file.removesuffix(".py").replace("/", ".")
        for target in (f"{a.module}.{a.name}", a.module, f"{a.module}.__init__"):
            if target in below and target != own:
                below[own].add(target)
                break
    left = dict(below)
    while leaves := [n for n, targets in left.items() if not targets & left.keys()]:
        for n in leaves:
            del left[n]
    assert not left, sorted(left)


def test_every_room_says_what_it_is_for() -> None:
    for door in PACKAGE.rglob("__init__.py"):
        assert "triton_kernels" in door.parts or ast.get_docstring(ast.parse(door.read_text())), (
            door
        )


def test_benchmarks_import_nothing_from_the_tests() -> None:
    """Tests may import benchmarks, which they check; the other direction would be a circle."""
    helpers = {path.stem for path in TESTS.rglob("*.py")} | {TESTS.name}
    found = []
    for path in (PACKAGE.parent / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, m) for m in modules if m.partition(".")[0] in helpers]
    assert not found, found


def lines_of(room: str) -> int:
    files = [p for p in sources() if room_of(p.relative_to(PACKAGE).parts) == room]
    return sum(len(p.read_text().splitlines()) for p in files)


if __name__ == "__main__":
    between = sorted({(a.room, a.of) for a in arrows() if a.room and a.of and a.room != a.of})
    for floor, rooms in reversed([*enumerate(FLOORS, 1)]):
        for room in rooms:
            to = ", ".join(b for a, b in between if a == room)
            print(f"{floor:2}  {room:15} {lines_of(room):6} lines  -> {to}")
    print(f"    gnsfast/__init__.py {lines_of(''):3} lines; {len(between)} arrows")

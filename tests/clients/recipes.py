# SPDX-License-Identifier: Apache-2.0
"""Runs the program of a recipe in ``docs/recipes`` as it stands, and without our lines.

A recipe has one Python block, a whole program. Our lines end with ``# new``; without them it is the
client's own program, whose ``with`` blocks of ours are ``if True:``. Every program sets ``losses``
and, by our lines, ``noise_scale``.
"""

import importlib.metadata
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
NEW = "# new"
ROUNDS = 3
"""Of the two programs in turn, for the time of a step."""
SENT = ("losses", "noise_scale", "logged")
"""Names of a launched program that come back, where it has them."""
Run = Callable[[bool], "Ran"]
Edits = Sequence[tuple[str, str]]
ROWS: list[dict[str, Any]] = []
"""The table: a row for each client."""


@dataclass
class Ran:
    """A program that has ended: its names, and the time of each step in seconds."""

    names: dict[str, Any]
    steps: list[float]

    @property
    def losses(self) -> list[float]:
        found: list[float] = self.names["losses"]
        assert found and all(math.isfinite(loss) for loss in found)
        return found


@dataclass
class Recipe:
    """A program of ``docs/recipes``."""

    name: str
    code: str = field(init=False)

    def __post_init__(self) -> None:
        text = (FOLDER / f"{self.name}.md").read_text(encoding="utf-8")
        [self.code] = re.findall(r"```python\n(.*?)```", text, flags=re.S)
        assert "gnsfast" not in self.plain and "gns" not in self.plain.split()

    @property
    def plain(self) -> str:
        """The client's own program."""
        lines, given = [], self.code.splitlines()
        for line, after in zip(given, [*given[1:], NEW]):
            if not line.endswith(NEW):
                lines.append(line)
            elif (bare := line.lstrip()).startswith("with ") and not after.endswith(NEW):
                lines.append(" " * (len(line) - len(bare)) + "if True:")
        return "\n".join(lines) + "\n"

    @property
    def added(self) -> int:
        return sum(line.endswith(NEW) for line in self.code.splitlines())

    def program(self, ours: bool = True, edits: Edits = (), **changed: Any) -> str:
        """The text, with other values for constants that are set at the start of a line. ``edits``
        replace one text by another.
        """
        code = self.code if ours else self.plain
        for old, new in edits:
            assert old in code, f"{self.name}.md has no {old!r}"
            code = code.replace(old, new)
        for name, value in changed.items():
            code, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", code)
            assert count == 1, f"{self.name}.md sets {name} {count} times"
        return code

    def run(self, ours: bool = True, edits: Edits = (), **changed: Any) -> Ran:
        """Run it in this process."""
        return execute(self.program(ours, edits, **changed), f"{self.name}.md")

    def launch(self, folder: Path, ranks: int, ours: bool = True, **options: Any) -> Ran:
        """Run it by torchrun in a new process for each rank, in a new folder below; names are
        what ``SENT`` lists.
        """
        folder = Path(tempfile.mkdtemp(dir=folder))
        program, out = folder / "program.py", folder / "ran.json"
        program.write_text(self.program(ours, **options), encoding="utf-8")
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run(
            [sys.executable, *command, "-m", "clients.recipes", str(program), str(out)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
        said = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
        assert done.returncode == 0, "\n".join(said or done.stderr.splitlines()[:60])
        return Ran(**json.loads(out.read_text(encoding="utf-8")))


def execute(code: str, name: str) -> Ran:
    names: dict[str, Any] = {"__name__": "__main__"}
    ends: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        exec(compile(code, name, "exec"), names)
    finally:
        hook.remove()
    return Ran(names, [after - before for before, after in zip(ends, ends[1:])])


def compare(
    recipe: Recipe, package: str, run: Run | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Run both programs in turn: are losses the same, and what does a step take?

    The first loss, of the same weights, is the same to the bit; later ones follow the rounding of
    weight gradients, which gnsfast's kernels add up in another order.
    """
    run = recipe.run if run is None else run
    pairs = [(run(False), run(True)) for _ in range(rounds)]
    plain, ours = pairs[0]
    assert len(plain.losses) == len(ours.losses) > 2
    assert plain.losses[0] == ours.losses[0]
    assert plain.losses[-1] != plain.losses[0]
    off = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, ours.losses))
    assert off < 1e-4, (plain.losses, ours.losses)
    times = [[statistics.median(ran.steps[1:]) for ran in pair] for pair in pairs]
    row = {
        "client": recipe.name,
        "version": version(package),
        "lines added": recipe.added,
        "loss": "bit-identical" if off == 0.0 else f"first to the bit, then within {off:.0e}",
        "step time over plain": round(min(b for _, b in times) / min(a for a, _ in times), 2),
    }
    ROWS.append(row)
    return row


def version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    return importlib.metadata.version(package)


def against(row: dict[str, Any], found: float, truth: float) -> None:
    """Note a noise scale over brute force, which must agree within 10 %."""
    row["noise scale over brute force"] = round(found / truth, 3)
    assert abs(found / truth - 1) < 0.1, (found, truth)


def squared_variation(lengths: Iterable[int]) -> float:
    """(std / mean)² of samples' lengths. A noise scale of a loss that is a mean over tokens leaves
    the noise of their number out: it is tr Σ / |G|² of the samples' summed losses less this.
    """
    values = torch.tensor(list(lengths), dtype=torch.float64)
    return float(values.var() / values.mean().square())


if __name__ == "__main__":
    ran = execute(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[1])
    if os.environ["RANK"] == "0":
        names = {key: value for key, value in ran.names.items() if key in SENT}
        Path(sys.argv[2]).write_text(json.dumps({"names": names, "steps": ran.steps}))

# SPDX-License-Identifier: Apache-2.0
"""The README's table of what an update costs, as ranges over all processors that have a record."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from benchmarks import record
from benchmarks.figures import OURS
from benchmarks.record import Record, Rows

STEP, AUTOCAST = "Whole training step", "Whole training step under autocast(bfloat16)"
UPDATES, SPARED = "Whole updates", "gnsfast, every=8"

TRAINED = {
    "GPT of width 384, 256 tokens, float32": (STEP, ""),
    "the same in bfloat16 (`torch.autocast`)": (AUTOCAST, ""),
    "the demo's GPT: width 96, 128 tokens": (UPDATES, "the demo's GPT, 8 samples"),
    "nanoGPT's recipe: width 128, 64 tokens": (UPDATES, "nanoGPT's recipe for a CPU, 12 samples"),
    "perceptron 32-64-8, 0.2 ms an update": (UPDATES, "perceptron 32-64-8, 16 samples"),
}
"""What a row calls it, its table in a record, and its model there."""

INTEL = "Intel Xeon with AMX"
SEEN: dict[str, dict[str, tuple[float, ...]]] = {
    OURS: {
        STEP: (1.039, 1.013),
        AUTOCAST: (1.020, 1.098),
        "the demo's GPT, 8 samples": (1.26,),
        "nanoGPT's recipe for a CPU, 12 samples": (1.23,),
        "perceptron 32-64-8, 16 samples": (2.9,),
    },
    SPARED: {
        "the demo's GPT, 8 samples": (1.00,),
        "nanoGPT's recipe for a CPU, 12 samples": (0.97,),
        "perceptron 32-64-8, 16 samples": (1.44,),
    },
}
"""Ratios that a trial on an Intel Xeon printed: they stand for it until a record of one does."""


def block(results: Path, root: Path) -> str:
    """The table, and where its numbers come from."""
    records = [
        each for each in map(record.read, sorted(results.glob("*-cpu*.json"))) if counts(each)
    ]
    makers = sorted({each.machine["processor"] for each in records})
    seen = not any("Intel" in maker for maker in makers)
    rows: Rows = []
    for name, (table, model) in TRAINED.items():
        by_maker = {
            maker: [
                r
                for each in records
                if each.machine["processor"] == maker
                for r in ratios(each, table, model, OURS)
            ]
            for maker in makers
        }
        spared = [r for each in records for r in ratios(each, table, model, SPARED)]
        if seen:
            by_maker[INTEL] = list(SEEN[OURS].get(model or table, ()))
            spared += SEEN[SPARED].get(model or table, ())
        every = [ratio for of_maker in by_maker.values() for ratio in of_maker]
        rows.append(
            {"an update, over plain torch's time": name, "all processors": f"**{span(every)}**"}
            | {maker: span(of_maker) for maker, of_maker in by_maker.items()}
            | {"with `every=8`": span(spared)}
        )
    return "\n".join([*record.markdown(rows), "", *sources(records, root, seen)])


def counts(each: Record) -> bool:
    """A record with such a table, by the kernels that its processor has."""
    chosen = each.machine.get("CPU kernel", "")
    return not {STEP, AUTOCAST, UPDATES}.isdisjoint(each.tables) and chosen.startswith("avx512")


def ratios(each: Record, table: str, model: str, contestant: str) -> Iterator[float]:
    """Medians, one for each number of threads."""
    for row in each.tables.get(table, ()):
        if row["contestant"] == contestant and row.get("model", "") == model:
            yield row["ratio"].ratio


def span(values: list[float]) -> str:
    if not values:
        return "-"
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def sources(records: list[Record], root: Path, seen: bool) -> list[str]:
    links = []
    for number, each in enumerate(records, 1):
        path = Path(os.path.relpath(each.path.with_suffix(".md"), root)).as_posix()
        links.append(f"[{number}]({path})")
    trial = f" No record is of an {INTEL} yet: a trial on one printed its numbers." if seen else ""
    text = f"Medians of records {', '.join(links)}.{trial}"
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)

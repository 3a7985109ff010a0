# SPDX-License-Identifier: Apache-2.0
"""The README's table of what an update costs: ranges over processors."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import processors, readme, record  # noqa: E402
from benchmarks.cpu import host  # noqa: E402
from benchmarks.measure import Timing  # noqa: E402

AMD, INTEL = "AMD EPYC", "Intel(R) Xeon(R) Processor"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a record of whole steps with these medians."""

    def write(name: str, processor: str, kernel: str, *medians: float) -> None:
        machine = {"processor": processor, "CPU kernel": kernel, "date": "2026-12-01"}
        monkeypatch.setattr(record, "machine", lambda: machine)
        rows: list[dict[str, Any]] = [{"contestant": "plain", "ratio": Timing(1, 1, 1, 1)}]
        for ratio in medians:
            timing = Timing(9.0, ratio, ratio - 0.1, ratio + 0.1)
            rows.append({"contestant": "gnsfast", "ratio": timing})
        record.write(f"cpu-{name}", "python", {processors.STEP: rows}, tmp_path)

    return write


def cells(folder: Path) -> dict[str, str]:
    """The row of a whole step in float32."""
    lines = processors.block(folder, folder).splitlines()
    heads, row = ([cell.strip() for cell in lines[i].split("|")[1:-1]] for i in (0, 2))
    return dict(zip(heads[1:], row[1:]))


def test_a_range_is_of_all_processors(written: Any, tmp_path: Path) -> None:
    """A record by other kernels than the processor's best is none of them."""
    written("one", AMD, "avx512", 0.9, 0.95)
    written("two", AMD, "avx512, avx512_bf16", 1.02)
    written("three", AMD, "avx2", 7.0)
    assert cells(tmp_path) == {
        "all processors": "**0.90 to 1.04**",
        AMD: "0.90 to 1.02",
        processors.INTEL: "1.01 to 1.04",
        "with `every=8`": "-",
    }
    text = " ".join(processors.block(tmp_path, tmp_path).split())
    assert "[1](2026-12-01-cpu-one.md), [2](" in text
    assert "cpu-three" not in text and "No record is of an Intel Xeon with AMX yet" in text


def test_a_record_takes_the_place_of_what_was_seen(written: Any, tmp_path: Path) -> None:
    written("one", AMD, "avx512", 0.9)
    written("two", INTEL, "avx512, amx", 1.5)
    assert cells(tmp_path) == {
        "all processors": "**0.90 to 1.50**",
        AMD: "0.90",
        INTEL: "1.50",
        "with `every=8`": "-",
    }
    assert processors.INTEL not in processors.block(tmp_path, tmp_path)


def test_the_readme_holds_it_first() -> None:
    """Under its heading stands the table, which a change of a record makes stale."""
    page = readme.README.read_text(encoding="utf-8")
    below = page.partition("## What it costs\n")[2]
    assert below.startswith("<!-- benchmarks: processors -->\n| ")
    assert processors.block(record.RESULTS, readme.README.parent) in below


def test_what_a_layer_costs_in_python() -> None:
    """Every part of an update, and their sum, beside plain torch's."""
    [rows] = host.tables(rounds=3).values()
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(row["block"], []).append(row)
    parts = ["open", "forward", "backward", "close"]
    names = {block: [row["part"] for row in of_block] for block, of_block in blocks.items()}
    assert names == dict.fromkeys(("GradientNoiseScale", "per_sample_sqnorms"), [*parts, "all"])
    assert all(row["gnsfast"] > row["plain"] for row in rows)
    ours, plain = [4e-3, 7e-3, 5e-3], [1e-3, 1e-3, 3e-3]  # of 100 layers
    row = {"block": "block", "part": "open", "plain": 10.0, "gnsfast": 50.0}
    assert host.row("block", "open", ours, plain) == row | {"added": "30.0 (20.0 to 60.0)"}

# SPDX-License-Identifier: Apache-2.0
"""What ``gnsfast plan`` prints: its tables; the words around them are in ``templates/plan.txt``."""

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gnsfast.cli.measurements import unused
from gnsfast.counts import short_count
from gnsfast.interval import Interval
from gnsfast.templates import template


def show(found: dict[str, Any], console: Console) -> None:
    """Laws and their range, the user's own fit, and costs."""
    filters = {"short": short_count, "number": number, "span": span, "commas": "{:,}".format}
    fit = found["measured"] or {"left_out": 0, "doubtful": 0}
    left_out = {"unused": unused(fit["left_out"], fit["doubtful"])}
    words: Any = template("gnsfast.cli", "plan.txt", **filters).make_module(found | left_out)

    say(console, words.title())
    for quantity in found["ranges"]:
        say(console, words.quantity(quantity))
        table = Table.grid(padding=(0, 2))
        for width, justify in ((23, "left"), (12, "right"), (13, "right")):
            table.add_column(min_width=width, justify=justify)  # type: ignore[arg-type]
        for row in found["laws"]:
            if row["quantity"] == quantity:
                sizes = (f"{short_count(row[unit])} {unit}" for unit in ("tokens", "samples"))
                range_ = words.beyond(row["extrapolated"]).strip()
                table.add_row(f"  {row['law']}", *sizes, range_)
        console.print(table)
    say(console, words.range_over_laws())
    sources = Table.grid(padding=(0, 2))
    for row in found["laws"]:
        note = f" ({row['note']})" if row["note"] else ""
        sources.add_row(row["law"], f"{row['formula']}{note}; {row['source']}", style="dim")
    console.print(Padding(sources, (1, 0)))
    if found["measured"]:
        say(console, words.fit())
    if found["trade_off"] is None:
        say(console, words.no_costs())
        return
    say(console, words.costs())
    console.print(_costs(found["trade_off"]["costs"], found["batch"]))
    say(console, words.note())


def say(console: Console, words: str) -> None:
    """Print what a template says, in rich's markup."""
    console.print(Text.from_markup(words.removesuffix("\n"), emoji=False))


def _costs(rows: list[dict[str, Any]], batch: int | None) -> Table:
    names = {"steps": "steps", "tokens": "tokens", "gpus": "GPUs", "days": "days"}
    names |= {"gpu_hours": "GPU-hours", "money": "cost"}
    shown = [name for name in names if rows[0][name] is not None]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("samples", *(names[name] for name in shown)):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        planned = row["batch_size"] == batch
        size = f"{row['batch_size']:,}" + ("\nplanned" if planned else "")
        cells = (_cell(row[name]) for name in shown)
        table.add_row(size, *cells, style="bold cyan" if planned else "")
    return table


def span(found: Interval) -> str:
    """A value, with its interval if it has one."""
    value, lower, upper = map(number, found)
    return value if found.lower == found.upper else f"{value} ({lower} to {upper})"


def _cell(value: Any) -> str:
    if not isinstance(value, Interval):
        return f"{value:,.0f}"
    text, low, high = map(number, value)
    if value.lower == value.upper:
        return text
    unit = high[-1] if high[-1].isalpha() else ""
    return f"{text}\n[dim]{low.removesuffix(unit)}-{high}[/]"  # a shared unit is written once


def number(value: float) -> str:
    """Three digits, so that a row fits a terminal of 80 columns."""
    if value < 999.5:
        return f"{value:.3g}"
    return "∞" if value == math.inf else short_count(value, 1000)

# SPDX-License-Identifier: Apache-2.0
"""The tables of ``gnsfast plan``."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gnsfast.counts import short_count

CHINCHILLA = 20
"""Tokens per parameter that give the lowest loss for a training budget."""
DEFINITIONS = {
    "critical batch size (b/a)": "twice the least steps, twice the least tokens",
    "critical batch size (20 % rule)": "20 % more steps than perfect scaling",
    "optimal batch size": "the lowest loss for these tokens",
}


def show(found: dict[str, Any], console: Console) -> None:
    """Laws and their range, the user's own fit, and costs."""
    console.print(_title(found))
    for quantity in found["ranges"]:
        console.print(_laws(found, quantity))
    console.print(_range(found))
    console.print(_sources(found))
    if found["measured"]:
        console.print(_measured(found))
    if found["trade_off"]:
        console.print(_costs(found))
    else:
        console.print(
            "Measure the critical batch size of your own run with [bold]gnsfast branch[/]. With "
            "--b-crit or --measured, plan also shows steps against tokens, and with --gpus time "
            "and money.",
            highlight=False,
        )


def _title(found: dict[str, Any]) -> Text:
    title = Text("Batch sizes for ", style="bold")
    title.append(f"{short_count(found['tokens'])} tokens", style="bold cyan")
    if found["params"] is not None:
        title.append(f", {short_count(found['params'])} parameters")
    title.append(f", samples of {found['context']:,} tokens")
    if found["chinchilla"]:
        title.append("\n20 tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556)", "dim")
    elif found["params"] is not None:
        each = found["tokens"] / found["params"]
        title.append(
            f"\n{_number(each)} tokens per parameter. {CHINCHILLA} give the lowest loss for "
        )
        title.append(
            "a given training budget (Hoffmann et al. 2022). More of them suit a smaller model, "
        )
        title.append("which is cheaper to serve.")
    if found["params"] is not None:
        served = short_count(3 * found["tokens"])
        title.append(f"\nServing {served} tokens takes as much compute as this training ", "dim")
        title.append("(2 N per token instead of 6 N)", "dim")
    return title


def _laws(found: dict[str, Any], quantity: str) -> Group:
    """The laws that predict ``quantity``."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=23)
    table.add_column(min_width=12, justify="right")
    table.add_column(min_width=13, justify="right")
    for row in found["laws"]:
        if row["quantity"] == quantity:
            table.add_row(
                f"  {row['law']}",
                f"{short_count(row['tokens'])} tokens",
                f"{short_count(row['samples'])} samples",
                _beyond(row["extrapolated"]),
            )
    heading = Text(f"\n{quantity}", "bold")
    heading.append(f": {DEFINITIONS[quantity]}", "dim not bold")
    return Group(heading, table)


def _range(found: dict[str, Any]) -> Text:
    least = min(found["laws"], key=lambda row: row["tokens"])
    largest = max(found["laws"], key=lambda row: row["tokens"])
    text = Text("\nrange over laws: ", "bold")
    for unit in ("tokens", "samples"):
        span = f"{short_count(least[unit])} to {short_count(largest[unit])} {unit}"
        text.append(span + (", " if unit == "tokens" else ""), "green")
    apart = largest["tokens"] / least["tokens"]
    text.append(
        f"\n{apart:.1f} times apart: the laws differ, and they predict different quantities",
        "dim not bold",
    )
    if found["batch"] is not None:
        times = [row["planned_over_it"] for row in (largest, least)]
        text.append(
            f"\nyour batch of {found['batch']:,} samples is {_number(times[0])} to "
            f"{_number(times[1])} times what the laws predict",
            "default not bold",
        )
    return text


def _beyond(extrapolated: float | None) -> Text:
    if extrapolated is None:
        return Text("range not published", "yellow")
    if extrapolated == 1.0:
        return Text("inside its fit", "green")
    times = f"{extrapolated:.2g}" if extrapolated < 10 else f"{extrapolated:,.0f}"
    return Text(f"extrapolated ×{times}", "yellow")


def _sources(found: dict[str, Any]) -> Padding:
    lines = Table.grid(padding=(0, 2))
    for row in found["laws"]:
        note = f" ({row['note']})" if row["note"] else ""
        lines.add_row(
            Text(row["law"], "dim"), Text(f"{row['formula']}{note}; {row['source']}", "dim")
        )
    return Padding(lines, (1, 0))


def _measured(found: dict[str, Any]) -> Padding:
    fit, tokens = found["measured"], short_count(found["tokens"])
    parts = {"without a value": fit["left_out"], "with doubts": fit["doubtful"]}
    unused = ", ".join(f"{n} {what}" for what, n in parts.items() if n)
    left_out = f" (left out: {unused})" if unused else ""
    if fit["said"] is None:
        text = Text(f"Your critical batch size after {short_count(fit['at'])} tokens", "bold")
        text.append(f"{left_out}\n")
        text.append(f"{_span(fit['samples'])} samples", "green")
        text.append(
            f", measured after {_number(fit['at'] / found['tokens'])} of {tokens} tokens. A power "
            "law needs measurements at 3 points.",
            "default not bold",
        )
        text.append_text(_whole_run(fit, tokens))
        return Padding(text, (0, 0, 1, 0))
    low, high = (short_count(t) for t in fit["range"])
    text = Text(f"Your critical batch sizes in samples, measured from {low} to {high}", "bold")
    text.append(f" tokens{left_out}\n")
    text.append(f"{fit['said']}\n", "default not bold")
    text.append(f"at {tokens} tokens: ", "default not bold")
    text.append(f"{_span(fit['samples'])} samples", "green")
    text.append(" for a new measurement (95 %), ", "default not bold")
    text.append_text(_beyond(fit["extrapolated"]))
    text.append(
        ". The interval does not include the spacing of your grid of batch sizes.",
        "default not bold",
    )
    text.append_text(_whole_run(fit, tokens))
    return Padding(text, (0, 0, 1, 0))


def _whole_run(fit: dict[str, Any], tokens: str) -> Text:
    """What measurements within a run say about the whole run; empty if they are of whole runs."""
    if fit["of_whole_runs"]:
        return Text()
    if fit["whole_run"] is None:
        return Text(
            "\nThis does not hold for the whole run, so plan shows no costs: measure later than "
            "after a tenth of the run, or pass --b-crit",
            "yellow",
        )
    if fit["said"] is None:
        return Text(
            "\nThe costs use it for the whole run. The critical batch size grows within a run, so "
            "it may be off by a factor of about 2.",
            "yellow",
        )
    text = Text(f"\nmean over a run of {tokens} tokens, which the costs use: ", "default")
    return text.append(f"{_span(fit['whole_run'])} samples", "bold green")


def _costs(found: dict[str, Any]) -> Group:
    trade = found["trade_off"]
    rows = trade["costs"]
    names = {"steps": "steps", "tokens": "tokens", "gpus": "GPUs", "days": "days"}
    names |= {"gpu_hours": "GPU-hours", "money": "cost"}
    shown = [name for name in names if rows[0][name] is not None]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("samples", *(names[name] for name in shown)):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        planned = row["batch_size"] == found["batch"]
        cells = [_cell(row[name]) for name in shown]
        size = Text(f"{row['batch_size']:,}" + ("\nplanned" if planned else ""))
        table.add_row(size, *cells, style="bold cyan" if planned else "")
    title = Text("Steps against tokens", "bold")
    title.append(
        " to reach one loss, with a critical batch size (b/a) of "
        f"{_span(trade['b_crit'])} samples from {trade['from']}",
        "default not bold",
    )
    plan = f"{short_count(found['tokens'])} tokens at "
    plan += f"{found['batch']:,} samples" if found["batch"] else "a small batch size"
    note = f"All rows reach the loss of {plan}. They follow "
    note += "(S/S_min - 1)(E/E_min - 1) = 1 (McCandlish et al. 2018, arXiv 1812.06162)."
    if trade["from"] == "your measurements":
        note += " Your measurements are used as b/a, although branches measure another definition."
    if "gpus" in shown:
        note += " Samples per GPU and its speed stay the same."
    waste = [_waste(trade["waste"], found["batch"])] if trade["waste"] else []
    return Group(title, Text(), table, Text(), *waste, Text(note, "dim"))


def _waste(waste: dict[str, Any], batch: int) -> Text:
    """What the planned batch size costs beyond what the fewest tokens would cost, in words."""
    share = {name: None if v is None else 100 * v for name, v in waste["share"].items()}
    text = Text(f"{_span(share)} % of the planned tokens buy fewer steps, not a lower loss", "bold")
    units = {"gpu_hours": "GPU-hours", "money": "in cost", "kwh": "kWh"}
    parts = [f"{_span(waste[k])} {unit}" for k, unit in units.items() if waste[k] is not None]
    said = f": {', '.join(parts)}" if parts else ""
    text.append(f"{said}. A much smaller batch than {batch:,} would save them.\n", "not bold")
    return text


def _span(interval: dict[str, float | None]) -> str:
    """A value, with its interval if it has one."""
    value, lower, upper = (interval[k] for k in ("value", "lower", "upper"))
    if lower == upper:
        return _number(value)
    return f"{_number(value)} ({_number(lower)} to {_number(upper)})"


def _cell(value: Any) -> Text:
    if not isinstance(value, dict):
        return Text(f"{value:,.0f}")
    cell = Text(_number(value["value"]))
    if value["lower"] != value["upper"]:
        low, high = _number(value["lower"]), _number(value["upper"])
        unit = high[-1] if high[-1].isalpha() else ""
        cell.append(f"\n{low.removesuffix(unit)}-{high}", "dim")  # a shared unit is written once
    return cell


def _number(value: float | None) -> str:
    """Three digits, so that a row fits a terminal of 80 columns."""
    if value is None:
        return "∞"
    if value < 999.5:
        return f"{value:.3g}"
    return f"{value / 1e3:.3g}K" if value < 99_950 else short_count(value)

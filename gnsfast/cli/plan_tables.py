# SPDX-License-Identifier: Apache-2.0
"""The tables of ``gnsfast plan``."""

from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gnsfast.cli.measurements import unused
from gnsfast.counts import short_count
from gnsfast.interval import Interval

CHINCHILLA = 20
"""Tokens per parameter that give the lowest loss for a training budget."""
DEFINITIONS = {
    "critical batch size (b/a)": "twice the least steps, twice the least tokens",
    "critical batch size (20 % rule)": "20 % more steps than perfect scaling",
    "optimal batch size": "the lowest loss for these tokens",
}


def show(found: dict[str, Any], console: Console) -> None:
    """Laws and their range, the user's own fit, and costs."""

    def say(text: str) -> None:
        console.print(Text.from_markup(text, emoji=False))

    say(_title(found))
    for quantity in found["ranges"]:
        say(f"\n[bold]{quantity}[/][dim]: {DEFINITIONS[quantity]}[/]")
        console.print(_laws(found, quantity))
    say(_range(found))
    sources = Table.grid(padding=(0, 2))
    for row in found["laws"]:
        note = f" ({row['note']})" if row["note"] else ""
        sources.add_row(row["law"], f"{row['formula']}{note}; {row['source']}", style="dim")
    console.print(Padding(sources, (1, 0)))
    if found["measured"]:
        say(_measured(found))
    trade = found["trade_off"]
    if trade is None:
        say(
            "Measure the critical batch size of your own run with [bold]gnsfast branch[/]. With "
            "--b-crit or --measured, plan also shows steps against tokens, and with --gpus time "
            "and money."
        )
        return
    say(
        "[bold]Steps against tokens[/] to reach one loss, with a critical batch size (b/a) of "
        f"{span(trade['b_crit'])} samples from {trade['from']}\n"
    )
    console.print(_costs(trade["costs"], found["batch"]))
    say("")
    if trade["waste"]:
        say(_waste(trade["waste"], found["batch"]))
    say(f"[dim]{_note(found)}[/]")


def _title(found: dict[str, Any]) -> str:
    tokens, params = found["tokens"], found["params"]
    title = f"[bold]Batch sizes for [cyan]{short_count(tokens)} tokens[/]"
    if params is not None:
        title += f", {short_count(params)} parameters"
    title += f", samples of {found['context']:,} tokens"
    if found["chinchilla"]:
        title += "\n[dim]20 tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556)[/]"
    elif params is not None:
        title += (
            f"\n{number(tokens / params)} tokens per parameter. {CHINCHILLA} give the lowest loss "
            "for a given training budget (Hoffmann et al. 2022). More of them suit a smaller "
            "model, which is cheaper to serve."
        )
    if params is not None:
        title += (
            f"\n[dim]Serving {short_count(3 * tokens)} tokens takes as much compute as this "
            "training (2 N per token instead of 6 N)[/]"
        )
    return title


def _laws(found: dict[str, Any], quantity: str) -> Table:
    """The laws that predict ``quantity``."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=23)
    table.add_column(min_width=12, justify="right")
    table.add_column(min_width=13, justify="right")
    for row in found["laws"]:
        if row["quantity"] == quantity:
            sizes = (f"{short_count(row[unit])} {unit}" for unit in ("tokens", "samples"))
            table.add_row(f"  {row['law']}", *sizes, _beyond(row["extrapolated"]))
    return table


def _range(found: dict[str, Any]) -> str:
    rows = sorted(found["laws"], key=lambda row: row["tokens"])
    least, largest = rows[0], rows[-1]
    units = ("tokens", "samples")
    spans = (f"{short_count(least[u])} to {short_count(largest[u])} {u}" for u in units)
    apart = largest["tokens"] / least["tokens"]
    text = (
        f"\n[bold]range over laws: [green]{', '.join(spans)}[/][/]\n[dim]{apart:.1f} times apart: "
        "the laws differ, and they predict different quantities[/]"
    )
    if found["batch"] is not None:
        times = [number(row["planned_over_it"]) for row in (largest, least)]
        text += (
            f"\nyour batch of {found['batch']:,} samples is {times[0]} to {times[1]} times what "
            "the laws predict"
        )
    return text


def _beyond(extrapolated: float | None) -> str:
    if extrapolated is None:
        return "[yellow]range not published[/]"
    if extrapolated == 1.0:
        return "[green]inside its fit[/]"
    times = f"{extrapolated:.2g}" if extrapolated < 10 else f"{extrapolated:,.0f}"
    return f"[yellow]extrapolated ×{times}[/]"


def _measured(found: dict[str, Any]) -> str:
    fit, tokens = found["measured"], short_count(found["tokens"])
    why = unused(fit["left_out"], fit["doubtful"])
    left_out = f" (left out: {why})" if why else ""
    samples = f"[bold green]{span(fit['samples'])} samples[/]"
    if fit["said"] is None:
        share = number(fit["at"] / found["tokens"])
        text = (
            f"[bold]Your critical batch size after {short_count(fit['at'])} tokens{left_out}[/]\n"
            f"{samples}, measured after {share} of {tokens} tokens. A power law needs "
            "measurements at 3 points."
        )
    else:
        low, high = (short_count(t) for t in fit["range"])
        text = (
            f"[bold]Your critical batch sizes in samples, measured from {low} to {high} tokens"
            f"{left_out}[/]\n{fit['said']}\nat {tokens} tokens: {samples} for a new measurement "
            f"(95 %), [bold]{_beyond(fit['extrapolated'])}[/]. The interval does not include the "
            "spacing of your grid of batch sizes."
        )
    return f"{text}{_whole_run(fit, tokens)}\n"


def _whole_run(fit: dict[str, Any], tokens: str) -> str:
    """What measurements within a run say about the whole run; empty if they are of whole runs."""
    if fit["of_whole_runs"]:
        return ""
    if fit["whole_run"] is None:
        return (
            "\n[bold yellow]This does not hold for the whole run, so plan shows no costs: measure "
            "later than after a tenth of the run, or pass --b-crit[/]"
        )
    if fit["said"] is None:
        return (
            "\n[bold yellow]The costs use it for the whole run. The critical batch size grows "
            "within a run, so it may be off by a factor of about 2.[/]"
        )
    mean = f"[green]{span(fit['whole_run'])} samples[/]"
    return f"\n[bold]mean over a run of {tokens} tokens, which the costs use: {mean}[/]"


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


def _note(found: dict[str, Any]) -> str:
    plan = f"{short_count(found['tokens'])} tokens at "
    plan += f"{found['batch']:,} samples" if found["batch"] else "a small batch size"
    note = f"All rows reach the loss of {plan}. They follow "
    note += "(S/S_min - 1)(E/E_min - 1) = 1 (McCandlish et al. 2018, arXiv 1812.06162)."
    if found["trade_off"]["from"] == "your measurements":
        note += " Your measurements are used as b/a, although branches measure another definition."
    if found["trade_off"]["costs"][0]["gpus"] is not None:
        note += " Samples per GPU and its speed stay the same."
    return note


def _waste(waste: dict[str, Any], batch: int) -> str:
    """What the planned batch size costs beyond what the fewest tokens would cost, in words."""
    units = {"gpu_hours": "GPU-hours", "money": "in cost", "kwh": "kWh"}
    parts = [f"{span(waste[k])} {unit}" for k, unit in units.items() if waste[k] is not None]
    said = f": {', '.join(parts)}" if parts else ""
    return (
        f"[bold]{span(waste['share'].times(100))} % of the planned tokens buy fewer steps, not a "
        f"lower loss[/]{said}. A much smaller batch than {batch:,} would save them.\n"
    )


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
    return "∞" if value == float("inf") else short_count(value, 1000)

# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it trains: a live panel on a terminal, plain lines elsewhere."""

import math
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gnsfast.cli.run import CHECK_BATCHES, CHECK_SAMPLES, Check, Progress, Run
from gnsfast.noise_scale import OTHERS, Estimate

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
LINE_EVERY = 50


def span(scale: Estimate) -> str:
    """The interval in words."""
    if scale.resolved:
        return f"95 %: {scale.lower:,.3g} to {scale.upper:,.3g}"
    if math.isfinite(scale.upper):
        return f"95 %: at most {scale.upper:,.3g}"
    return f"95 %: at least {scale.lower:,.3g}" if scale.lower > 0 else "not resolved yet"


def value(scale: Estimate) -> str:
    return f"{scale.noise_scale:,.3g}" if math.isfinite(scale.noise_scale) else "?"


def others(now: Progress) -> list[tuple[str, str]]:
    """The other noise scales that are measured, each in words and with its interval."""
    return [
        (OTHERS[metric], f"{value(scale)}  {span(scale)}")
        for metric, scale in now.scale.others.items()
    ]


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def sparkline(values: list[float]) -> str:
    """The last ``WIDTH`` values as bars between their least and largest."""
    shown = [v for v in values if math.isfinite(v)][-WIDTH:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((v - low) / step)] for v in shown)


def verdict(check: Check) -> list[tuple[str, str]]:
    """The estimate and its check, side by side."""
    return [
        (f"estimate, {CHECK_BATCHES} batches", f"{value(check.estimate)}  {span(check.estimate)}"),
        (
            f"brute force, {CHECK_SAMPLES:,} single samples",
            f"{value(check.brute_force)}  {span(check.brute_force)}",
        ),
        ("estimate / brute force", f"{check.ratio:.2f}"),
        *(
            (
                f"{OTHERS[metric]}, brute force",
                f"{value(found)}  {found.lower:,.3g} to {found.upper:,.3g}: "
                f"{'within' if check.agrees(metric) else 'NOT within'} the estimate's "
                f"{value(check.estimate.under(metric))}  {span(check.estimate.under(metric))}",
            )
            for metric, found in check.single_samples.items()
        ),
    ]


class Lines:
    """A line every ``LINE_EVERY`` steps, for files and pipes."""

    def __init__(self, run: Run, console: Console) -> None:
        self.run, self.console = run, console

    def __enter__(self) -> "Lines":
        s = self.run.settings
        self.print(
            f"{self.run.parameters:,} parameters, {len(self.run.text):,} bytes of text, "
            f"{s.steps} steps of {s.samples} samples"
        )
        self.print("  step   loss  noise scale  interval                   statistics    time")
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def step(self, now: Progress) -> None:
        if now.step % LINE_EVERY and now.step != self.run.settings.steps:
            return
        self.print(
            f"{now.step:6}  {now.loss:5.2f}  {value(now.scale):>11}  {span(now.scale):25}  "
            f"{percent(now.share):>10}  {now.seconds:4.0f} s"
        )
        for name, result in others(now):
            self.print(f"        {name}: {result}")

    def checking(self, done: float) -> None:
        if done <= 64 / CHECK_SAMPLES:
            self.print("Checking the last checkpoint with single-sample gradients ...")

    def checked(self, check: Check) -> None:
        for name, result in verdict(check):
            self.print(f"{name:35}  {result}")


class Panel:
    """Redraws itself in place, without a thread, which would take a core from the training."""

    def __init__(self, run: Run, console: Console) -> None:
        self.run = run
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.now: Progress | None = None
        self.done = 0.0
        self.check: Check | None = None
        self.live = Live(self.draw(), console=console, auto_refresh=False)

    def __enter__(self) -> "Panel":
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def step(self, now: Progress) -> None:
        self.now = now
        self.losses.append(now.loss)
        self.scales.append(now.scale.noise_scale)
        self.live.update(self.draw(), refresh=True)

    def checking(self, done: float) -> None:
        self.done = done
        self.live.update(self.draw(), refresh=True)

    def checked(self, check: Check) -> None:
        self.check = check
        self.live.update(self.draw(), refresh=True)

    def draw(self) -> RenderableType:
        s = self.run.settings
        title = (
            f"GPT of {self.run.parameters:,} parameters, {len(self.run.text):,} bytes of text, "
            f"{s.samples} samples a step"
        )
        return Frame(
            Group(self._progress(), Text(), self._numbers(), *self._others(), *self._verdict()),
            title=f"[bold]gnsfast demo[/]  {title}",
            title_align="left",
            box=box.ROUNDED,
            width=min(100, self.live.console.width) if hasattr(self, "live") else 100,
        )

    def _progress(self) -> Table:
        steps, step = self.run.settings.steps, self.now.step if self.now else 0
        row = Table.grid(padding=(0, 2))
        training = step < steps
        left = "starting"
        if self.now and training:
            left = f"{self.now.seconds * (steps / step - 1):.0f} s left"
        elif self.now:
            left = "done" if self.check else "checking with single samples"
        bar = ProgressBar(total=1.0, completed=step / steps if training else self.done, width=WIDTH)
        row.add_row(f"step {step}/{steps}", bar, left)
        return row

    def _numbers(self) -> Table:
        table = Table.grid(padding=(0, 2))
        if self.now is None:
            return table
        scale = self.now.scale
        drift = "  [yellow]moving[/]" if scale.drift else ""
        table.add_row("loss", f"{self.now.loss:.2f}", f"[cyan]{sparkline(self.losses)}[/]")
        table.add_row(
            "noise scale", f"[bold]{value(scale)}[/]", f"[green]{sparkline(self.scales)}[/]"
        )
        table.add_row("", "", f"{span(scale)}, in samples, mean of {scale.updates} updates{drift}")
        table.add_row("at the newest", value(scale.present), span(scale.present))
        table.add_row("statistics", percent(self.now.share), "of a step's time")
        return table

    def _others(self) -> list[RenderableType]:
        if self.now is None or not self.run.settings.metrics:
            return []
        table = Table.grid(padding=(0, 2))
        for name, result in others(self.now):
            table.add_row(f"noise scale {name}", f"[bold]{result}[/]")
        return [Text(), table]

    def _verdict(self) -> list[RenderableType]:
        if self.check is None:
            return []
        table = Table.grid(padding=(0, 2))
        for name, result in verdict(self.check):
            table.add_row(name, f"[bold]{result}[/]")
        return [Text(), Text("Noise scale of the frozen last checkpoint, in samples:"), table]

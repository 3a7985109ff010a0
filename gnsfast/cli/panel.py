# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it trains: a live panel on a terminal, plain lines elsewhere."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gnsfast.cli.run import CHECK_BATCHES, CHECK_SAMPLES, Check, Demo, Progress
from gnsfast.cli.terminal import parts
from gnsfast.noise_scale import OTHERS, Estimate

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
LINE_EVERY = 50


def number(x: float) -> str:
    return f"{x:,.3g}"


def span(scale: Estimate) -> str:
    """The interval in words."""
    ends = scale.interval.ends(number)
    return f"95 %: {ends}" if ends else "not resolved yet"


def value(scale: Estimate) -> str:
    return number(scale.noise_scale) if math.isfinite(scale.noise_scale) else "?"


def both(scale: Estimate) -> str:
    return f"{value(scale)}  {span(scale)}"


def others(now: Progress) -> list[tuple[str, str]]:
    """The other noise scales that are measured, each in words and with its interval."""
    return [(OTHERS[metric], both(scale)) for metric, scale in now.scale.others.items()]


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
    rows = [
        (f"estimate, {CHECK_BATCHES} batches", both(check.estimate)),
        (f"brute force, {CHECK_SAMPLES:,} single samples", both(check.brute_force)),
        ("estimate / brute force", f"{check.ratio:.2f}"),
    ]
    for metric, found in check.single_samples.items():
        within = "within" if check.agrees(metric) else "NOT within"
        ends = f"{number(found.lower)} to {number(found.upper)}"
        text = (
            f"{value(found)}  {ends}: {within} the estimate's {both(check.estimate.under(metric))}"
        )
        rows.append((f"{OTHERS[metric]}, brute force", text))
    return rows


class Lines(nullcontext[Any]):
    """A line every ``LINE_EVERY`` steps, for files and pipes."""

    def __init__(self, demo: Demo, console: Console) -> None:
        self.demo, self.console = demo, console

    def __enter__(self) -> "Lines":
        o = self.demo.options
        self.print(
            f"{self.demo.parameters:,} parameters, {len(self.demo.text):,} bytes of text, "
            f"{o.steps} steps of {o.samples} samples"
        )
        self.print("  step   loss  noise scale  interval                   statistics    time")
        return self

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def step(self, now: Progress) -> None:
        if now.step % LINE_EVERY and now.step != self.demo.options.steps:
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


class Panel(Live):
    """Redraws itself in place, without a thread, which would take a core from the training."""

    def __init__(self, demo: Demo, console: Console) -> None:
        self.demo = demo
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.now: Progress | None = None
        self.done = 0.0
        self.check: Check | None = None
        super().__init__(console=console, auto_refresh=False, get_renderable=self.draw)

    def step(self, now: Progress) -> None:
        self.now = now
        self.losses.append(now.loss)
        self.scales.append(now.scale.noise_scale)
        self.refresh()

    def checking(self, done: float) -> None:
        self.done = done
        self.refresh()

    def checked(self, check: Check) -> None:
        self.check = check
        self.refresh()

    def draw(self) -> RenderableType:
        title = (
            f"GPT of {self.demo.parameters:,} parameters, {len(self.demo.text):,} bytes of text, "
            f"{self.demo.options.samples} samples a step"
        )
        return Frame(
            Group(self._progress(), Text(), *self._numbers()),
            title=f"[bold]gnsfast demo[/]  {title}",
            title_align="left",
            box=box.ROUNDED,
            width=min(100, self.console.width),
        )

    def _progress(self) -> Table:
        steps, step = self.demo.options.steps, self.now.step if self.now else 0
        training, left = step < steps, "starting"
        if self.now and training:
            left = f"{self.now.seconds * (steps / step - 1):.0f} s left"
        elif self.now:
            left = "done" if self.check else "checking with single samples"
        bar = ProgressBar(total=1.0, completed=step / steps if training else self.done, width=WIDTH)
        table = Table.grid(padding=(0, 2))
        table.add_row(f"step {step}/{steps}", bar, left)
        return table

    def _numbers(self) -> Iterable[RenderableType]:
        if (now := self.now) is None:
            return ()
        shown = {"now": now, "losses": self.losses, "scales": self.scales}
        rows = {"others": others(now), "verdict": verdict(self.check) if self.check else []}
        words = {"value": value, "span": span, "sparkline": sparkline}
        return parts("panel.txt", share=percent(now.share), **shown, **rows, **words)

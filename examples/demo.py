# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT with its noise scale on the screen, then checks the number with the gradients
of single samples. The folder gets the log, metrics.jsonl, and its page, report.html.

python examples/demo.py --steps 200 --out runs/demo
"""

import argparse
import math
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from tiny_gpt import CONTEXT, TinyGPT, draw, loss_of, read_text

import gnsfast
from gnsfast.cli.records import read_runs
from gnsfast.cli.report import write_report
from gnsfast.integrations.trackers import JSONLTracker, metrics

LOG_EVERY, PLAIN_EVERY, CHECKED_BATCHES, BARS = 10, 8, 40, "▁▂▃▄▅▆▇█"


def said(scale) -> tuple[str, str]:
    """A noise scale and its 95 % interval, where the window resolves them."""
    value = f"{scale.noise_scale:.3g}" if math.isfinite(scale.noise_scale) else "?"
    return value, scale.interval.ends("{:.3g}".format) or "not resolved yet"


def sparkline(values: list[float]) -> str:
    shown = [v for v in values if math.isfinite(v)][-48:]
    low, high = min(shown, default=0), max(shown, default=0)
    step = (high - low) / (len(BARS) - 1) or 1
    return "".join(BARS[round((v - low) / step)] for v in shown)


class Screen:
    """A panel that is drawn again in place; where there is no terminal, a line every 50 steps."""

    def __init__(self, title: str, steps: int, console: Console) -> None:
        self.title, self.steps, self.console = title, steps, console
        self.losses, self.scales = [], []
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if not self.live:
            console.print(title, highlight=False)

    def show(self, step: int, loss: float, scale, share: float, seconds: float) -> None:
        self.losses.append(loss)
        self.scales.append(scale.noise_scale)
        (value, ends), (newest, newest_ends) = said(scale), said(scale.present)
        cost = f"{share:.1%}" if math.isfinite(share) else "-"
        if self.live:
            table = Table.grid(padding=(0, 2))
            table.add_row(f"step {step}/{self.steps}", f"{seconds:.0f} s")
            table.add_row("loss", f"{loss:.2f}", sparkline(self.losses), style="cyan")
            table.add_row("noise scale", value, sparkline(self.scales), style="bold green")
            moving = ", moving" if scale.drift else ""
            table.add_row("", "", f"{ends} samples, mean of {scale.updates} updates{moving}")
            table.add_row("at the newest", newest, newest_ends)
            table.add_row("statistics", cost, "of a step's time")
            self.live.update(Panel(table, title=self.title, width=100), refresh=True)
        elif step % 50 == 0 or step == self.steps:
            self.console.print(
                f"step {step:5}  loss {loss:5.2f}  noise scale {value:>6} ({ends})  "
                f"statistics {cost:>5} of a step's time  {seconds:4.0f} s",
                highlight=False,
            )


def train(options, text, model, gns, optimizer, generator, tracker, screen) -> None:
    start, plain, measured = time.perf_counter(), [], []
    for step in range(1, options.steps + 1):
        batch, began = draw(text, options.samples, generator), time.perf_counter()
        if step % PLAIN_EVERY == 0:  # without gnsfast: the medians' difference is what it costs
            loss = loss_of(model, batch)
            loss.backward()
        else:
            with gns.update(len(batch)):
                loss = loss_of(model, batch)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (measured if step % PLAIN_EVERY else plain).append(time.perf_counter() - began)
        if step % LOG_EVERY == 0 or step == options.steps:
            share = math.nan  # the first steps are slower
            if len(plain) > 2:
                share = 1 - statistics.median(plain) / statistics.median(measured[5:])
            scale, seconds = gns.compute(), time.perf_counter() - start
            tokens = options.samples * CONTEXT
            found = metrics(scale, tokens=step * tokens, batch_tokens=tokens, per_module=True)
            found |= {"loss": loss.item(), "seconds": round(seconds, 3), "share": share}
            tracker.log(found, step)
            screen.show(step, loss.item(), scale, share, seconds)


def check(options, text, model, generator, tracker, console) -> None:
    """At the frozen last weights: an estimate like that of training, beside single samples."""
    gns = gnsfast.GradientNoiseScale(model)
    for _ in range(CHECKED_BATCHES):
        batch = draw(text, options.samples, generator)
        with gns.update(len(batch)):
            loss_of(model, batch).backward()
        model.zero_grad()
    console.print("Checking the last weights with the gradients of single samples ...")
    samples = draw(text, options.single_samples, generator).split(1)
    estimate, truth = gns.compute(), gnsfast.brute_force_noise_scale(model, loss_of, samples)
    ratio = estimate.noise_scale / truth.noise_scale
    sides = {"estimate": estimate.interval.record(), "brute_force": truth.interval.record()}
    counts = {"batches": CHECKED_BATCHES, "single_samples": len(samples)}
    tracker.record({"kind": "check", **sides, "ratio": ratio, **counts})
    for name, scale in (
        (f"estimate, {CHECKED_BATCHES} batches", estimate),
        (f"brute force, {len(samples):,} single samples", truth),
    ):
        console.print(f"{name:35}  {' (95 %: '.join(said(scale))})", highlight=False)
    console.print(f"{'estimate / brute force':35}  {ratio:.2f}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--samples", type=int, default=32, help="of a step")
    parser.add_argument("--single-samples", type=int, default=2048, help="of the check at the end")
    parser.add_argument("--seed", type=int, default=0)
    folder = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, default=folder, help="a new folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True)

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    text, model, console = read_text(), TinyGPT(), Console(soft_wrap=True)
    gns = gnsfast.GradientNoiseScale(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    about = f"gnsfast demo, {options.samples} samples a step"
    screen = Screen(
        f"{about}: GPT of {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{len(text):,} bytes of text",
        *(options.steps, console),
    )
    header = {"name": about, "about": "A byte-level GPT trained on Python's language reference."}
    header |= {"loss_unit": "nats per byte", "steps": options.steps, "samples": options.samples}
    log = options.out / "metrics.jsonl"
    tracker = JSONLTracker(log, run=header | {"seed": options.seed, "torch": torch.__version__})
    try:
        with screen.live or nullcontext():
            train(options, text, model, gns, optimizer, generator, tracker, screen)
        check(options, text, model, generator, tracker, console)
    except KeyboardInterrupt:  # the report has what there is
        tracker.record({"kind": "interrupted"})
    tracker.close()
    report = write_report(read_runs([log]), options.out / "report.html")
    console.print(f"Report: {report}\nMetrics: {log}")


if __name__ == "__main__":
    main()

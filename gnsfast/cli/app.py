# SPDX-License-Identifier: Apache-2.0
"""The commands and their options."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gnsfast.cli import doctor as doctor_
from gnsfast.cli.run import Run, Settings
from gnsfast.cli.session import Session

app = typer.Typer(
    name="gnsfast",
    help="The gradient noise scale, from inside the backward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps.")] = 800,
    samples: Annotated[int, typer.Option(min=2, help="Samples of a step.")] = 32,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder [runs/demo-DATE-TIME].")] = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT on real text with its noise scale on the screen, then check the number.

    Writes metrics.jsonl and report.html into the run folder. Ctrl-C ends the run with a report.
    """
    folder = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.is_file() or (folder / "metrics.jsonl").exists():
        raise typer.BadParameter(f"{folder} exists already: name a new folder", param_hint="--out")
    session = Session(Run(Settings(steps, samples, seed)), folder, Console(quiet=as_json))
    result = session.go()
    if as_json:
        typer.echo(json.dumps(result))
    raise typer.Exit(130 if session.interrupted else 0)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and back-ends, and why one is missing."""
    found = doctor_.examine()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        doctor_.show(found, Console())

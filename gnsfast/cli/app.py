# SPDX-License-Identifier: Apache-2.0
"""The commands."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gnsfast.cli import branch, doctor, plan, report, schedule
from gnsfast.cli.live import watch
from gnsfast.cli.options import input_errors, takes
from gnsfast.cli.records import read_runs
from gnsfast.cli.terminal import show
from gnsfast.critical_batch import branches
from gnsfast.interval import Interval
from gnsfast.parallel import is_first

app = typer.Typer(
    name="gnsfast",
    help="The gradient noise scale, from inside the backward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def print_found(name: str, found: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or what the template with this name makes of it."""
    if as_json:
        typer.echo(json.dumps(plain(found), allow_nan=False))
    else:
        show(name, found, Console())


def plain(value: Any) -> Any:
    """For JSON: an interval with names, and null for an end that is infinite."""
    if isinstance(value, Interval):
        return value.record()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


@app.command("report")
@takes(report.Options)
@input_errors()
def report_(options: report.Options, as_json: Json = False) -> None:
    """Draw one or more runs into one HTML page: loss, noise scale, batch size.

    Ctrl-C ends --live and keeps the page.
    """
    paths = list(dict.fromkeys(options.runs))
    page = options.out or report.default_page(paths)
    if page.suffix != ".html":
        raise typer.BadParameter(f"{page} is not an .html file", param_hint="--out")
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    if options.live:
        console.print(f"Live: {page}. Ctrl-C ends it.")
        found = watch(paths, page, options.every, console.print)
    else:
        found = read_runs(paths)
        report.write_report(found, page)
    if as_json:
        typer.echo(json.dumps({"runs": [run.summary() for run in found], "report": str(page)}))
    console.print(f"Report: {page}")


@app.command("doctor")
def doctor_(as_json: Json = False) -> None:
    """Show versions, devices and back-ends, and say why a back-end is missing."""
    print_found("doctor.txt", doctor.examine(), as_json)


@app.command("plan")
@takes(plan.Options)
@input_errors()
def plan_(options: plan.Options, as_json: Json = False) -> None:
    """Show what published laws and your measurements say about a batch size, and what it costs."""
    print_found("plan.txt", plan.examine(options), as_json)


@app.command("schedule")
@takes(schedule.Options)
@input_errors()
def schedule_(options: schedule.Options, as_json: Json = False) -> None:
    """Show the steps of a batch-size schedule, what it saves, and its form in other frameworks."""
    print_found("schedule.txt", schedule.examine(options), as_json)


class Short(typer.core.TyperGroup):
    """``gnsfast branch TARGET`` is ``gnsfast branch measure TARGET``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = args[:1] and args[0] not in (*self.commands, "--help")
        own = ["measure", *args] if given else args
        return super().parse_args(ctx, own)


branching = typer.Typer(cls=Short, no_args_is_help=True)
app.add_typer(branching, name="branch")


@branching.callback()
def branching_() -> None:
    """Measure the critical batch size of a run by training branches of it with other batch sizes.

    "gnsfast branch TARGET ..." is short for "gnsfast branch measure TARGET ...".
    """


@branching.command("measure")
@takes(branch.Options)
@input_errors()
def branch_(options: branch.Options, as_json: Json = False) -> None:
    """Train branches of a run, and apply the rule to their losses.

    Ctrl-C stops it. Run the same command again to continue. Each line that --list prints is a
    command of its own: run them by xargs -P, a Slurm array or any scheduler.
    """

    def say(each: branches.Branch) -> None:
        if is_first():
            typer.echo(json.dumps(each.record()) if as_json else branch.branch_line(each))

    try:
        if options.list:
            return typer.echo("\n".join(branch.commands(options)))
        if options.only is not None:
            return say(branch.train(options))
        result = branch.measure(options, None if as_json else say)
    except KeyboardInterrupt:
        out = options.out
        typer.echo(f"gnsfast: stopped. Run the same command again to continue in {out}", err=True)
        raise typer.Exit(130) from None
    finally:
        branch.leave_group()
    print_result(result, options.factor, options.out, as_json)


@branching.command("result")
@takes(branch.ResultOptions)
@input_errors()
def result_(options: branch.ResultOptions, as_json: Json = False) -> None:
    """Apply the rule to the branches that a folder holds."""
    result = branches.critical_batch_in(options.folder)
    print_result(result, options.factor, options.folder, as_json)


def print_result(
    result: branches.CriticalBatch, factor: str | None, out: Path, as_json: bool
) -> None:
    if not is_first():
        return
    typer.echo(json.dumps(result.record()) if as_json else f"\n{result}")
    if factor is not None:
        result.factor(factor).save(out / "factor.json")
        if not as_json:
            typer.echo(f"factor.json is of this run: {result.run}")

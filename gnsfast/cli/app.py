# SPDX-License-Identifier: Apache-2.0
"""The commands."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gnsfast.cli import branch, doctor, plan, report, schedule
from gnsfast.cli.live import watch
from gnsfast.cli.options import takes
from gnsfast.cli.output import Command, answer, print_json
from gnsfast.cli.records import read_runs
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


@app.command("report", cls=Command)
@takes(report.Options)
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
        runs = [run.summary() for run in found]
        print_json({"kind": "report", "runs": runs, "report": str(page)})
    console.print(f"Report: {page}")


@app.command("doctor", cls=Command)
def doctor_(as_json: Json = False) -> None:
    """Show versions, devices and back-ends, and say why a back-end is missing."""
    answer("doctor.txt", doctor.examine(), as_json)


@app.command("plan", cls=Command)
@takes(plan.Options)
def plan_(options: plan.Options, as_json: Json = False) -> None:
    """Show what published laws and your measurements say about a batch size, and what it costs."""
    answer("plan.txt", plan.examine(options), as_json)


@app.command("schedule", cls=Command)
@takes(schedule.Options)
def schedule_(options: schedule.Options, as_json: Json = False) -> None:
    """Show the steps of a batch-size schedule, what it saves, and its form in other frameworks."""
    answer("schedule.txt", schedule.examine(options), as_json)


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


@branching.command("measure", cls=Command)
@takes(branch.Options)
def branch_(options: branch.Options, as_json: Json = False) -> None:
    """Train branches of a run, and apply the rule to their losses.

    Ctrl-C stops it. Run the same command again to continue. Each line that --list prints is a
    command of its own: run them by xargs -P, a Slurm array or any scheduler.
    """

    def say(each: branches.Branch) -> None:
        if is_first():
            if as_json:
                print_json({"kind": "branch"} | each.record())
            else:
                typer.echo(branch.branch_line(each))

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


@branching.command("result", cls=Command)
@takes(branch.ResultOptions)
def result_(options: branch.ResultOptions, as_json: Json = False) -> None:
    """Apply the rule to the branches that a folder holds."""
    result = branches.critical_batch_in(options.folder)
    print_result(result, options.factor, options.folder, as_json)


def print_result(
    result: branches.CriticalBatch, factor: str | None, out: Path, as_json: bool
) -> None:
    if not is_first():
        return
    if as_json:
        record = result.record()
        for end in Interval._fields:
            del record[end]
        print_json(record | {"critical_batch_samples": result.interval})
    else:
        typer.echo(f"\n{result}")
    if factor is not None:
        result.factor(factor).save(out / "factor.json")
        if not as_json:
            typer.echo(f"factor.json is of this run: {result.run}")

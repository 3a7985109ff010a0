# SPDX-License-Identifier: Apache-2.0
"""The commands and their options."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gnsfast.arguments import check_choice
from gnsfast.cli import branch as branch_
from gnsfast.cli import doctor as doctor_
from gnsfast.cli import executors, plan_tables
from gnsfast.cli import plan as plan_
from gnsfast.cli import report as report_
from gnsfast.cli import schedule as schedule_
from gnsfast.cli.input_errors import input_errors
from gnsfast.cli.live import watch
from gnsfast.cli.records import read_runs
from gnsfast.cli.run import Run, Settings
from gnsfast.cli.session import run_demo
from gnsfast.cli.summary import summary
from gnsfast.counts import parse_count
from gnsfast.noise_scale import METRICS

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
    samples: Annotated[int, typer.Option(min=2, help="Samples in a step.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the data.")] = 0,
    optimizer: Annotated[
        str, typer.Option(help="adamw, sgd, signum, or muon (AdamW for all but hidden matrices).")
    ] = "adamw",
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Another noise scale: adam, sign, spectral. May be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (runs/demo-DATE-TIME).")] = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT on real text with its noise scale on the screen, then check the number.

    Writes metrics.jsonl and report.html into the run folder. Ctrl-C ends the run with a report.
    """
    folder = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.is_file() or (folder / "metrics.jsonl").exists():
        raise typer.BadParameter(f"{folder} exists already: name a new folder", param_hint="--out")
    with input_errors():
        settings = Settings(steps, samples, seed, optimizer, tuple(dict.fromkeys(metric or ())))
    result = run_demo(Run(settings), folder, Console(quiet=as_json))
    if as_json:
        typer.echo(json.dumps(result))
    raise typer.Exit(130 if result["interrupted"] else 0)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders with .jsonl files, or such files."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page (RUN/report.html, or report.html for many runs).")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Rewrite it until all runs end.")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two reads.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Draw one or more runs into one HTML page: loss, noise scale, batch size.

    Ctrl-C ends --live and keeps the page.
    """
    paths = list(dict.fromkeys(runs))
    page = out or report_.default_page(paths)
    if page.suffix != ".html":
        raise typer.BadParameter(f"{page} is not an .html file", param_hint="--out")
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    with input_errors():
        if live:
            console.print(f"Live: {page}. Ctrl-C ends it.")
            found = watch(paths, page, every, console.print)
        else:
            found = read_runs(paths)
            report_.write_report(found, page)
    if as_json:
        typer.echo(json.dumps({"runs": [summary(run) for run in found], "report": str(page)}))
    console.print(f"Report: {page}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and back-ends, and say why a back-end is missing."""
    found = doctor_.examine()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        doctor_.show(found, Console())


@app.command()
def plan(
    tokens: Annotated[str | None, typer.Option(help="Tokens of the run: 20B, 1.5e9.")] = None,
    params: Annotated[
        str | None,
        typer.Option(help="Parameters of the model. Without --tokens, 20 tokens for each."),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens in a sample (as --measured says, or 4096).")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Planned batch size, in samples.")] = None,
    b_crit: Annotated[
        str | None,
        typer.Option(
            help="Critical batch size in samples, VALUE[:LOWER:UPPER]: b/a of steps = a + b/batch."
        ),
    ] = None,
    b_twenty_percent: Annotated[
        str | None,
        typer.Option(help="The same by Zhang's 20 % rule, instead of --b-crit."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Loss in nats per token, for the laws that use it.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs that train the planned batch.")] = None,
    tokens_per_second: Annotated[
        str | None, typer.Option(help="Tokens per second that you measured on one GPU.")
    ] = None,
    gpu_hour_price: Annotated[
        str | None, typer.Option(help="Price of one GPU for an hour, in any currency.")
    ] = None,
    gpu_watts: Annotated[
        str | None, typer.Option(help="Power that one GPU draws, for the energy.")
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            help="Critical batch sizes that you measured: a CSV file with the columns "
            "tokens,value,tokens_per_sample, a JSONL file, or a run folder."
        ),
    ] = None,
    whole_runs: Annotated[
        bool,
        typer.Option("--whole-runs", help="Each value in --measured is that of a whole run."),
    ] = False,
    optimal_at: Annotated[
        str | None,
        typer.Option(help="Optimal batch size that you measured, TOKENS:SAMPLES, for Power Lines."),
    ] = None,
    critical_at: Annotated[
        str | None,
        typer.Option(
            help="Critical batch size that you measured, TOKENS:SAMPLES, for Power Lines."
        ),
    ] = None,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="The model is a mixture of experts, and --params counts what one token uses.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what published laws and your measurements say about a batch size, and what it costs."""
    with input_errors():
        found = plan_.examine(
            plan_.Options(
                tokens,
                params,
                context,
                batch,
                b_crit,
                b_twenty_percent,
                loss,
                gpus,
                tokens_per_second,
                gpu_hour_price,
                gpu_watts,
                measured,
                whole_runs,
                optimal_at,
                critical_at,
                experts,
            )
        )
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        plan_tables.show(found, Console())


@app.command()
def schedule(
    source: Annotated[
        str, typer.Argument(help="A controller's log or run folder, or '0:1024 168B:2048'.")
    ],
    total_tokens: Annotated[str, typer.Option(help="Tokens of the run: 658B.")],
    tokens_per_sample: Annotated[str, typer.Option(help="The sequence length.")],
    against: Annotated[
        str | None, typer.Option(help="Fixed batch size to compare with (the first stage's).")
    ] = None,
    step_seconds: Annotated[
        str | None,
        typer.Option(help="Measured seconds per step: '1024:2.1 2048:3.9'."),
    ] = None,
    export: Annotated[
        str | None, typer.Option(help="megatron, olmo-core, lightning, huggingface or nanogpt.")
    ] = None,
    per_device_batch: Annotated[
        str | None,
        typer.Option(help="Samples in a forward pass, for lightning, huggingface, nanogpt."),
    ] = None,
    processes: Annotated[
        str, typer.Option(help="Data-parallel processes, for lightning, huggingface, nanogpt.")
    ] = "1",
    samples_per_epoch: Annotated[
        str | None, typer.Option(help="Samples in an epoch, for lightning.")
    ] = None,
    round_to_epochs: Annotated[
        bool,
        typer.Option(
            "--round-to-epochs",
            help="For lightning: move each change to the start of the next epoch, and list it.",
        ),
    ] = False,
    lr: Annotated[
        str | None,
        typer.Option(
            help="How the learning rate grows: sqrt, linear, keep (a log's own, or sqrt)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the steps of a batch-size schedule, what it saves, and its form in other frameworks."""
    with input_errors():
        found = schedule_.examine(
            schedule_.Options(
                source,
                total_tokens,
                tokens_per_sample,
                against,
                step_seconds,
                export,
                per_device_batch,
                processes,
                samples_per_epoch,
                round_to_epochs,
                lr,
            )
        )
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        schedule_.show(found, Console())


@app.command()
def branch(
    target: Annotated[
        str, typer.Argument(help="file.py:function or module:function that makes the run.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for branches; finished ones are kept.")],
    tokens: Annotated[str, typer.Option(help="Tokens that each branch trains: 2B, 500K.")],
    k: Annotated[str, typer.Option(help="Batch sizes, in multiples of the run's.")] = "0.5,1,2,4,8",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder to restore the run from before it is measured.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="How far a matching loss may lie above that of smaller batches.")
    ] = 0.01,
    alpha: Annotated[
        float, typer.Option(help="Weight of the newest step in a branch's smoothed loss.")
    ] = 0.5,
    lr: Annotated[
        str, typer.Option(help="How the learning rate grows with k: sqrt, linear, keep.")
    ] = "sqrt",
    loss: Annotated[
        str, typer.Option(help="Loss to compare: train, or evaluate (what the run evaluates).")
    ] = "train",
    save_every: Annotated[
        str | None, typer.Option(help="Tokens between two saves within a branch (no saves).")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that train branches at once; 0 uses this process.")
    ] = 0,
    executor: Annotated[
        str | None, typer.Option(help="Train branches as jobs of submitit (Slurm) or dask.")
    ] = None,
    executor_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for --executor: slurm_partition=gpu. May be repeated."),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="Command that starts a branch: 'torchrun --nproc-per-node 8'."),
    ] = None,
    noise_scale: Annotated[
        bool, typer.Option(help="Measure the noise scale at the checkpoint.")
    ] = True,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measurements to average, each on other data.")
    ] = 1,
    factor: Annotated[
        str | None,
        typer.Option(
            help="Write OUT/factor.json: critical batch size / this noise scale (euclidean, adam, "
            "sign or spectral)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the critical batch size of a run by training branches of it with other batch sizes.

    Ctrl-C stops it. Run the same command again to continue.
    """
    try:
        with input_errors(), ExitStack() as stack:
            every = None if save_every is None else parse_count(save_every, "--save-every")
            where = None if checkpoint is None else checkpoint.absolute()
            make_run = branch_.Target(branch_.absolute(target), where)
            if factor is not None:
                check_choice("--factor", factor, METRICS)
                if not noise_scale:
                    raise ValueError(
                        "--factor needs the noise scale, which --no-noise-scale leaves out: drop "
                        "--no-noise-scale"
                    )
            if launcher is not None and repeats > 1:
                raise ValueError(
                    "--repeats does not work with --launcher: this process skips data between "
                    "repeats, and the launched processes draw their own. Drop one of the two"
                )
            engine = stack.enter_context(executors.opened(executor, executor_option or [], out))
            elsewhere = launcher or (executor and repeats == 1)
            result = branch_.measure(
                repeats,
                None if elsewhere else make_run(),
                folder=out,
                k=branch_.grid(k),
                delta_tokens=parse_count(tokens, "--tokens"),
                tolerance=tolerance,
                alpha=alpha,
                lr=lr,
                loss=loss,
                save_every_tokens=every,
                workers=workers,
                executor=engine,
                launcher=launcher,
                make_run=make_run,
                noise_scale=noise_scale,
                factor=factor,
                on_branch=None if as_json else lambda b: typer.echo(branch_.branch_line(b)),
            )
    except KeyboardInterrupt:
        typer.echo(f"gnsfast: stopped. Run the same command again to continue in {out}", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(result.record()) if as_json else f"\n{result}")
    if factor is not None:
        with input_errors():
            result.factor(factor).save(out / "factor.json")
        if not as_json:
            typer.echo(f"factor.json is of this run: {result.run}")

# SPDX-License-Identifier: Apache-2.0
"""``gnsfast schedule``: a batch-size schedule, what it saves, and its form in other frameworks."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from gnsfast.arguments import check_choice
from gnsfast.cli.options import Count, Span, pairs
from gnsfast.cli.words import page
from gnsfast.critical_batch import exports, late_switch, laws, seesaw, token_schedules
from gnsfast.critical_batch.rules import NAMES, Rules

SHAPES = ("cosine", "linear", "wsd")
IN_STEPS = ("torchtitan", "levanter")
"""Tools whose learning rate is a function of optimizer steps, of whatever size."""


@dataclass(frozen=True)
class Options:
    """A schedule, what it is compared with, and where it goes.

    Args:
        source: A controller's log or run folder, or '0:1024 168B:2048'.
        total_tokens: Tokens of the run: 658B.
        tokens_per_sample: The sequence length.
        against: Fixed batch size to compare with (the first stage's).
        step_seconds: Measured seconds per step: '1024:2.1 2048:3.9'.
        export: megatron, olmo-core, torchtitan, levanter, huggingface or lightning.
        per_device_batch: Samples in a forward pass, for torchtitan, huggingface, lightning.
        processes: Data-parallel processes, for torchtitan, huggingface, lightning.
        lr: How the learning rate grows: sqrt, linear, keep (a log's own, or sqrt).
        seesaw: Double the batch where this learning rate halves: cosine, linear, wsd.
        warm_up: Tokens of that learning rate's warm-up.
        decay: Tokens of its decay, for wsd.
        final: Share of its peak at which it ends.
        late: Share of the tokens before which the batch does not grow.
        max_batch: The batch does not grow beyond it.
        b_crit: Critical batch size that you measured, in samples, VALUE[:LOWER:UPPER].
    """

    source: Annotated[str, Argument]
    total_tokens: Count
    tokens_per_sample: Count
    against: Count | None = None
    step_seconds: Annotated[dict[int, float], pairs] | None = None
    export: str | None = None
    per_device_batch: Count | None = None
    processes: Count = 1
    lr: str | None = None
    seesaw: str | None = None
    warm_up: Count = 0
    decay: Count | None = None
    final: float = 0.1
    late: float | None = None
    max_batch: Count | None = None
    b_crit: Span | None = None


def examine(options: Options) -> dict[str, Any]:
    """Everything that ``show`` prints and ``--json`` writes."""
    shape = None if options.seesaw is None else read_shape(options)
    schedule, lr = read_schedule(options, shape), read_rule(options)
    against = options.against
    saved, first = schedule.steps_saved(against), schedule.stages[0].batch_size
    found: dict[str, Any] = {
        "kind": "schedule",
        "total_tokens": schedule.total_tokens,
        "tokens_per_sample": schedule.tokens_per_sample,
        "lr": lr,
        "stages": [
            {
                **asdict(stage),
                "lr_factor": (factor := Rules(lr).lr_factor(stage.batch_size / first)),
                "lr_of_peak": None if shape is None else shape(stage.tokens) * factor,
            }
            for stage in schedule.stages
        ],
        "shape": options.seesaw,
        "steps": _saved(saved),
        "note": laws.SAME_COMPUTE,
        "seconds": None,
        "export": None,
    }
    if options.step_seconds is not None:
        found["seconds"] = _saved(schedule.seconds_saved(options.step_seconds, against))
    if options.export is not None:
        found["export"] = exported(options, schedule, lr)
    return found


def exported(options: Options, schedule: laws.BatchSizeSchedule, lr: str) -> dict[str, Any]:
    """The schedule in a tool's own form, code for what that form does not hold, and notes."""
    tool, told = str(options.export), dict[str, Any]()
    value: Any = None
    check_choice("--export", tool, exports.TOOLS)
    if tool in IN_STEPS and options.seesaw is not None:
        raise ValueError(
            f"{tool} counts its learning rate's schedule in steps, and Seesaw needs one in tokens: "
            f"--export {', '.join(name for name in exports.TOOLS if name not in IN_STEPS)}"
        )
    if tool in ("torchtitan", "huggingface", "lightning") and options.per_device_batch is None:
        raise ValueError(f"--export {tool} needs --per-device-batch")
    if tool == "megatron":
        value, told = exports.megatron(schedule), {"end": exports.end_samples(schedule)}
        try:
            told["ramp"] = f"gives the same steps: {exports.megatron_ramp(schedule)}"
        except ValueError as error:
            told["ramp"] = f"cannot give these steps: {error}"
    elif tool == "olmo-core":
        value = exports.olmo_core(schedule, lr=lr)
    elif tool == "levanter":
        value = exports.levanter(schedule)
    passes: dict[str, Any] = {
        "micro_batch": options.per_device_batch,
        "processes": options.processes,
    }
    lines = exports.lines(tool, schedule, lr, **passes)
    told |= {"schedule": schedule, "first_steps": exports.first_steps(schedule)}
    notes = page("notes.txt").render(framework=tool, departures=_departures(schedule), **told)
    return {"for": tool, "value": value, "notes": notes.splitlines(), "lines": lines}


def read_shape(options: Options) -> token_schedules.Shape:
    """The learning rate that ``--seesaw`` names."""
    check_choice("--seesaw", name := options.seesaw, SHAPES)
    if (name == "wsd") != (options.decay is not None):
        raise ValueError("--seesaw wsd needs --decay, the tokens of its decay, and no other does")
    more = {} if options.decay is None else {"decay": options.decay}
    make: Callable[..., token_schedules.Shape] = getattr(token_schedules, str(name))
    return make(options.total_tokens, warm_up=options.warm_up, final=options.final, **more)


def read_schedule(
    options: Options, shape: token_schedules.Shape | None = None
) -> laws.BatchSizeSchedule:
    """From a controller's log (a file or a run folder), or from thresholds, which ``--seesaw`` and
    ``--late`` make from the first batch size.
    """
    source, log = options.source, Path(options.source).exists()
    if not log and ":" not in source:
        raise ValueError(
            f"{source!r} is neither a log file, a run folder, nor thresholds such as "
            "'0:1024 168B:2048'"
        )
    read = laws.BatchSizeSchedule.from_log if log else laws.BatchSizeSchedule.parse
    sizes: dict[str, Any] = {
        "total_tokens": options.total_tokens,
        "tokens_per_sample": options.tokens_per_sample,
    }
    schedule = read(source, **sizes)
    if shape is None and options.late is None:
        return schedule
    if len(schedule.thresholds) > 1:
        raise ValueError(
            f"--seesaw and --late decide when the batch grows, and {source!r} does too: pass the "
            f"first batch size alone, '0:{schedule.thresholds[0][1]}'"
        )
    if options.b_crit is None:
        raise ValueError(
            "--seesaw and --late hold below the critical batch size alone: measure it with gnsfast "
            "branch, and pass --b-crit VALUE:LOWER:UPPER"
        )
    sizes |= {"critical": options.b_crit}
    first, largest, late = schedule.thresholds[0][1], options.max_batch, options.late
    if shape is not None:
        if options.lr not in (None, "sqrt", "linear"):
            raise ValueError(f"--lr {options.lr} is no Seesaw: pass --lr sqrt (Adam), or linear")
        return seesaw(shape, first, max_batch_size=largest, late=late or 0.0, **sizes)
    if largest is None:
        raise ValueError("--late without --seesaw needs --max-batch, the batch size from there on")
    return late_switch(first, largest, late=late or 0.0, **sizes)


def read_rule(options: Options) -> str:
    """The rule of the learning rate: that of a log's decisions, else ``lr`` or ``"sqrt"``."""
    source, lr = options.source, options.lr
    if lr is not None:
        check_choice("--lr", lr, NAMES["lr"])
    changes = laws.read_records(source) if Path(source).exists() else []
    changes = [r for r in changes if r.get("kind") == "decision" and r.get("old") != r.get("new")]
    fits = [lr] if lr is not None else ["sqrt", "linear", "keep"]
    for change in changes:
        factor, k = change.get("lr_factor"), change["new"] / change["old"]
        if factor is not None:
            fits = [name for name in fits if math.isclose(Rules(name).lr_factor(k), factor)]
        if not fits:
            rule = "any one rule gives" if lr is None else f"--lr {lr} gives"
            raise ValueError(
                f"{source}: the decision at {change['tokens']:,} tokens multiplied the learning "
                f"rate by {factor:g}, which is not what {rule} for {k:g} times the batch size"
            )
    return fits[0]


def _saved(saved: laws.Saved) -> dict[str, float]:
    return {**asdict(saved), "saved": saved.saved, "share": saved.share}


def _departures(schedule: laws.BatchSizeSchedule) -> list[tuple[Any, Any]]:
    """The changes of a schedule that a trainer makes late, or leaves out, with their stages."""
    changes = zip(laws.aligned_changes(schedule), schedule.stages[1:])
    return [(c, stage) for c, stage in changes if (stage.steps if c.samples is None else c.late)]

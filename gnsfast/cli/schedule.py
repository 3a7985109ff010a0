# SPDX-License-Identifier: Apache-2.0
"""``gnsfast schedule``: a batch-size schedule, what it saves, and its form in other frameworks."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from gnsfast.arguments import check_choice
from gnsfast.cli.options import Count, pairs
from gnsfast.cli.words import page
from gnsfast.critical_batch import exports, laws
from gnsfast.critical_batch.rules import NAMES, Rules


@dataclass(frozen=True)
class Options:
    """A schedule, what it is compared with, and where it goes.

    Args:
        source: A controller's log or run folder, or '0:1024 168B:2048'.
        total_tokens: Tokens of the run: 658B.
        tokens_per_sample: The sequence length.
        against: Fixed batch size to compare with (the first stage's).
        step_seconds: Measured seconds per step: '1024:2.1 2048:3.9'.
        export: megatron, olmo-core, lightning, huggingface or nanogpt.
        per_device_batch: Samples in a forward pass, for lightning, huggingface, nanogpt.
        processes: Data-parallel processes, for lightning, huggingface, nanogpt.
        samples_per_epoch: Samples in an epoch, for lightning.
        round_to_epochs: For lightning: move each change to the start of the next epoch, and list
            it.
        lr: How the learning rate grows: sqrt, linear, keep (a log's own, or sqrt).
    """

    source: Annotated[str, Argument]
    total_tokens: Count
    tokens_per_sample: Count
    against: Count | None = None
    step_seconds: Annotated[dict[int, float], pairs] | None = None
    export: str | None = None
    per_device_batch: Count | None = None
    processes: Count = 1
    samples_per_epoch: Count | None = None
    round_to_epochs: bool = False
    lr: str | None = None


def examine(options: Options) -> dict[str, Any]:
    """Everything that ``show`` prints and ``--json`` writes."""
    schedule, lr, against = read_schedule(options), read_rule(options), options.against
    saved, first = schedule.steps_saved(against), schedule.stages[0].batch_size
    found: dict[str, Any] = {
        "kind": "schedule",
        "total_tokens": schedule.total_tokens,
        "tokens_per_sample": schedule.tokens_per_sample,
        "lr": lr,
        "stages": [
            {**asdict(stage), "lr_factor": Rules(lr).lr_factor(stage.batch_size / first)}
            for stage in schedule.stages
        ],
        "steps": _saved(saved),
        "note": laws.SAME_COMPUTE,
        "seconds": None,
        "export": None,
    }
    if options.step_seconds is not None:
        found["seconds"] = _saved(schedule.seconds_saved(options.step_seconds, against))
    if options.export is not None:
        if options.export not in EXPORTS:
            raise ValueError(f"--export is {options.export!r}, but must be {', '.join(EXPORTS)}")
        value, lines, notes = EXPORTS[options.export](schedule, options, lr)
        said = page("notes.txt").render(framework=options.export, **notes).splitlines()
        found["export"] = {"for": options.export, "value": value, "notes": said, "lines": lines}
    return found


def read_schedule(options: Options) -> laws.BatchSizeSchedule:
    """From a controller's log (a file or a run folder), or from thresholds."""
    source, log = options.source, Path(options.source).exists()
    if not log and ":" not in source:
        raise ValueError(
            f"{source!r} is neither a log file, a run folder, nor thresholds such as "
            "'0:1024 168B:2048'"
        )
    read = laws.BatchSizeSchedule.from_log if log else laws.BatchSizeSchedule.parse
    length = options.tokens_per_sample
    return read(source, total_tokens=options.total_tokens, tokens_per_sample=length)


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


Export = tuple[Any, str, dict[str, Any]]
"""A schedule in a framework's own form, lines of code for what that form does not hold, and what
the notes in ``templates/notes.txt`` say of it.
"""


def _megatron(schedule: laws.BatchSizeSchedule, options: Options, lr: str) -> Export:
    last = schedule.stages[-1]
    end = last.tokens // schedule.tokens_per_sample + last.steps * last.batch_size
    try:
        ramp = f"gives the same steps: {exports.megatron_ramp(schedule)}"
    except ValueError as error:
        ramp = f"cannot give these steps: {error}"
    lines = exports.megatron_lines(schedule, lr)
    return exports.megatron(schedule), lines, {"end": end, "ramp": ramp}


def _olmo_core(schedule: laws.BatchSizeSchedule, options: Options, lr: str) -> Export:
    return exports.olmo_core(schedule, lr=lr), "", {"departures": _departures(schedule)}


def _lightning(schedule: laws.BatchSizeSchedule, options: Options, lr: str) -> Export:
    found = exports.lightning(
        schedule,
        samples_per_batch=_passes(options)["micro_batch"] * options.processes,
        samples_per_epoch=_required(options.samples_per_epoch, "--samples-per-epoch", options),
        round_to_epochs=options.round_to_epochs,
        lr=lr,
    )
    return asdict(found), exports.lightning_lines(found.lr_factors), {}


def _hugging_face(schedule: laws.BatchSizeSchedule, options: Options, lr: str) -> Export:
    passes, processes = _passes(options), options.processes
    own = {"per_device_train_batch_size": passes["micro_batch"], "processes": processes}
    plan = exports.hugging_face(schedule, **own, lr=lr)
    notes = {"max_steps": exports.hugging_face_max_steps(schedule)}
    lines = exports.hugging_face_lines(schedule, lr, **passes)
    return plan, lines, notes | {"departures": _departures(schedule)}


def _nanogpt(schedule: laws.BatchSizeSchedule, options: Options, lr: str) -> Export:
    return None, exports.nanogpt_lines(schedule, lr, **_passes(options)), {}


EXPORTS = {
    "megatron": _megatron,
    "olmo-core": _olmo_core,
    "lightning": _lightning,
    "huggingface": _hugging_face,
    "nanogpt": _nanogpt,
}


def _passes(options: Options) -> dict[str, int]:
    """The samples of a forward pass, and on how many processes."""
    micro_batch = _required(options.per_device_batch, "--per-device-batch", options)
    return {"micro_batch": micro_batch, "processes": options.processes}


def _required(value: int | None, name: str, options: Options) -> int:
    if value is None:
        raise ValueError(f"--export {options.export} needs {name}")
    return value


def _departures(schedule: laws.BatchSizeSchedule) -> list[tuple[Any, Any]]:
    """The changes of a schedule that a trainer makes late, or leaves out, with their stages."""
    changes = zip(laws.aligned_changes(schedule), schedule.stages[1:])
    return [(c, stage) for c, stage in changes if (stage.steps if c.samples is None else c.late)]

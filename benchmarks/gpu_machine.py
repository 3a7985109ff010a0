# SPDX-License-Identifier: Apache-2.0
"""``make gpu``: ``python -m benchmarks gpu`` on a bare machine without a network, for a limited
time. Needs the standard library alone.

It prepares what such a machine lacks (``machine/prepare.py``), then runs the parts, the most
valuable first, each stage in a process group of its own. Whatever is finished is at once in
``OUT/gpu.tar.gz``. A later call that finds it there, or unpacked in ``.gpu/``, does not repeat it.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # started by its path
    sys.path[0] = str(ROOT)

from benchmarks.machine import prepare as gpu_prepare  # noqa: E402
from benchmarks.machine.job import Job, alone  # noqa: E402

SECONDS = {
    "correctness": 150,
    "ops": 180,
    "routes": 60,
    "attention": 90,
    "cuda": 60,
    "step": 240,
    "curves": 300,
    "peers": 150,
    "host": 150,
    "sanitizers": 240,
}
"""Of each part, estimated before any GPU ran it."""

STAGES = (
    ("correctness",),
    ("ops", "routes", "attention", "cuda"),
    ("step",),
    ("curves",),
    ("peers", "host"),
    ("sanitizers",),
)
STAGE_SECONDS = 600
"""A stage that takes longer is stopped."""
END = 30
"""Seconds that are kept for the summary."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_machine.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="gpu.tar.gz and gpu.log; default: .gpu")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of this call")
    parser.add_argument("--resume", type=Path, help="an unpacked gpu.tar.gz; default: .gpu")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="to be installed first")
    parser.add_argument("--again", nargs="+", choices=SECONDS, default=[], metavar="PART")
    parser.add_argument("--rehearse", action="store_true", help="tiny cases, on this CPU")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="runs the parts")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gnsfast-gpu-") as scratch:
        # What a rehearsal measures is never taken for a result, nor for a part that is finished.
        throw_away = options.rehearse and not options.resume
        usual = Path(scratch) / "results" if throw_away else ROOT / ".gpu"
        results = (options.resume or usual).resolve()
        out = options.out or ROOT / (".gpu-rehearsal" if options.rehearse else ".gpu")
        with alone(results):
            job = Job(out.resolve(), results, options.limit, ROOT)
            if not throw_away:
                job.take_up()
            failed = work(job, options, Path(scratch))
    raise SystemExit(1 if failed else 0)


def work(job: Job, options: argparse.Namespace, scratch: Path) -> bool:
    """Prepare, measure and summarise; whether something failed."""
    gpu_prepare.install(job, options.wheels.resolve(), scratch / "site")
    gpu_prepare.link(job)
    if not options.rehearse:
        gpu_prepare.build(job)
    for part in options.again:
        set_aside(job.records, part)
    failed = stages(job, options.python, options.rehearse)
    end = ["-m", "benchmarks", "gpu", "--summary", "--record", str(job.records)]
    failed |= job.run([*options.python, *end], job.left()) != 0
    left = [part for part in SECONDS if not finished(job.records, part)]
    job.say(f"not finished: {', '.join(left)}" if left else "every part is finished")
    job.pack()
    return failed


def stages(job: Job, python: list[str], rehearse: bool) -> bool:
    """Whether a process failed. The parts after one that ends its process still run."""
    failed, ran = False, False
    if kept := [part for part in SECONDS if finished(job.records, part)]:
        job.say(f"finished by a former call: {', '.join(kept)}")
    for parts in order(job.records):
        while parts:
            left = job.left() - END
            chosen = fitting(parts, left, 0 if ran else 1)
            if left <= 0 or not chosen:
                time = f"{seconds(parts)} s estimated, {max(left, 0):.0f} s left"
                job.say(f"not started: {' '.join(parts)}: {time}")
                break
            for part in chosen:
                set_aside(job.records, part)
            job.say(f"{' '.join(chosen)}: {seconds(chosen)} s estimated, {left:.0f} s left")
            run = [*python, "-m", *command_of(chosen, rehearse), "--record", str(job.records)]
            status, ran = job.run(run, min(STAGE_SECONDS, left)), True
            failed |= status != 0
            begun = [part for part in chosen if records(job.records, part)]
            if not begun:
                job.say(f"not finished: {' '.join(parts)}: the process began none of them")
                break
            parts = [part for part in parts if part not in begun]
    return failed


def order(folder: Path) -> list[list[str]]:
    """What is not finished, by stages. A part that a former call began may hang, so it comes after
    those that were never tried, in a stage of its own.
    """
    tried = [part for part in SECONDS if records(folder, part)]
    never = [[part for part in stage if part not in tried] for stage in STAGES]
    return [*never, *([part] for part in tried if not finished(folder, part))]


def fitting(parts: list[str], left: float, least: int) -> list[str]:
    """The first of them that are estimated to take at most ``left`` seconds; at least ``least``."""
    counts = range(len(parts), least, -1)
    return parts[: next((n for n in counts if seconds(parts[:n]) <= left), least)]


def seconds(parts: list[str]) -> int:
    """Estimated, of all of them."""
    return sum(SECONDS[part] for part in parts)


def command_of(parts: list[str], rehearse: bool) -> list[str]:
    """What runs them, after ``python -m``."""
    return ["benchmarks", "gpu", "--only", *parts, *(["--rehearse"] if rehearse else [])]


def finished(folder: Path, part: str) -> bool:
    """Whether its record is whole."""
    return any(folder.glob(f"????-??-??-gpu-{part}.json"))


def records(folder: Path, part: str) -> list[Path]:
    """The files of its record, whole or not: a part that has begun has one."""
    name = re.compile(rf"\d{{4}}-\d\d-\d\d-gpu-{part}(-unfinished)?\.(json|md)")
    return [path for path in folder.iterdir() if name.fullmatch(path.name)]


def set_aside(folder: Path, part: str) -> None:
    """Give its record another name, so that a new one does not replace what was measured."""
    for path in records(folder, part):
        names = (f"{path.stem}-former-{n}{path.suffix}" for n in range(1, 1000))
        path.rename(next(folder / name for name in names if not (folder / name).exists()))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu`` and ``gpu``: check every contestant, time it beside plain torch,
record it; ``batch-size``: runs of a growing batch beside fixed ones, and critical batch sizes by
branches; ``geometry``: which noise scale follows it; ``model``: what norms cost on a GPU, counted;
``families``: of which of transformers' architectures the norms are right; ``intervals``: whether
those of noise scales hold the truth; ``present``: whether they do at the weights of a training run;
``updates``: what whole updates of small models cost.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    batch_size,
    compare,
    cpu,
    families,
    gate,
    geometry,
    gpu,
    intervals,
    model,
    present_weights,
    readme,
    record,
    regressions,
    rehearsal,
    updates,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    devices = parser.add_subparsers(dest="device", required=True)
    on_cpu = devices.add_parser("cpu", help="all contestants on this CPU; half an hour")
    on_cpu.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    on_cpu.add_argument("--rounds", type=int, default=7)
    on_cpu.add_argument("--only", choices=cpu.PARTS, nargs="+", default=tuple(cpu.PARTS))
    on_cpu.add_argument("--record", type=Path, help="folder for the record, else only printed")
    on_gpu = devices.add_parser("gpu", help="the kernels on this GPU: right, then fast")
    on_gpu.add_argument("--only", choices=gpu.SECONDS, nargs="+", default=list(gpu.SECONDS))
    on_gpu.add_argument("--record", type=Path, default=record.RESULTS, help="folder of the record")
    on_gpu.add_argument("--rehearse", action="store_true", help="tiny cases, on this CPU")
    on_gpu.add_argument("--summary", action="store_true", help="only of the folder's records")
    sizes = devices.add_parser("batch-size", help="what a controlled batch size does; 30 minutes")
    sizes.add_argument("--steps", type=int, default=batch_size.STEPS, help="of the small batch")
    sizes.add_argument("--seeds", type=int, default=batch_size.SEEDS)
    sizes.add_argument("--only", choices=("runs", "repeats"), nargs="+", default=("runs",))
    sizes.add_argument("--runs", type=Path, required=True, help="folder for logs and branches")
    sizes.add_argument("--record", type=Path, help="folder for the record, else only printed")
    geometry.add_arguments(devices.add_parser("geometry", help="which noise scale follows it"))
    intervals.add_arguments(devices.add_parser("intervals", help="do they hold the truth"))
    now = devices.add_parser("present", help="do they hold it at the present weights; minutes")
    present_weights.add_arguments(now)
    updates.add_arguments(devices.add_parser("updates", help="of small models; two minutes"))
    families.add_arguments(devices.add_parser("families", help="what of transformers is right"))
    model.add_arguments(devices.add_parser("model", help="what norms cost on a GPU, counted"))
    regressions.add(devices.add_parser("budgets", help="committed counts that may not grow"))
    devices.add_parser("compare", help="two records: what changed by more than its noise")
    devices.add_parser("readme", help="writes the README's table and figure from the records")
    given = sys.argv[1:] if arguments is None else arguments
    alone = {"compare": compare.main, "readme": readme.main}
    if given and given[0] in alone:
        return alone[given[0]](given[1:])
    options = parser.parse_args(given)
    if options.device == "cpu" and min(options.threads) < 1:
        parser.error(f"--threads {' '.join(map(str, options.threads))}: 1 or more")
    if options.device == "cpu" and options.rounds < 5:
        parser.error(f"{options.rounds} rounds have no quartiles: --rounds 5 or more")
    run = {"cpu": run_cpu, "gpu": gpu.run, "batch-size": run_batch_size, "model": model.run}
    run |= {"budgets": regressions.run, "families": families.run, "geometry": geometry.run}
    run |= {"intervals": intervals.run, "present": present_weights.run}
    run |= {"updates": updates.run}
    if options.device == "gpu" and options.rehearse:
        run["gpu"] = rehearsal.run
    run[options.device](options)


def run_batch_size(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    parts = {
        "runs": lambda: batch_size.batch_size(options.steps, options.seeds, options.runs),
        "repeats": lambda: batch_size.repeats(options.steps, options.runs),
    }
    names = {"runs": "cpu-batch-size", "repeats": "cpu-batch-size-repeats"}
    for part in options.only:
        tables = parts[part]()
        for title, rows in tables.items():
            print(f"\n{title}\n\n" + "\n".join(record.markdown(rows)))
        if options.record:
            command = f"python -m benchmarks batch-size --only {part} --steps {options.steps}"
            command += f" --seeds {options.seeds}" if part == "runs" else ""
            written = record.write(names[part], command, tables, options.record)
            print(f"\nwritten: {written}")


def run_cpu(options: argparse.Namespace) -> None:
    """Part by part into a record with a provisional name, so that an interrupted run keeps its
    parts and replaces no whole record. A part that raises becomes a row.
    """
    some = options.only if set(options.only) != set(cpu.PARTS) else ()
    words = ["--threads", *options.threads, "--rounds", options.rounds]
    words += ["--only", *some] if some else []
    command = " ".join(map(str, ["python -m benchmarks cpu", *words]))
    tables: dict[str, list[dict[str, Any]]] = {}
    broken: list[str] = []
    name = "-".join(["cpu", *some])
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
    threads = list(dict.fromkeys(options.threads))
    for part in options.only:
        start = time.perf_counter()
        try:
            found = cpu.PARTS[part](threads, options.rounds)
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            broken.append(part)
            found = {part: [{"part": part, "result": gate.raised(error)}]}
        print(f"\n{part}: {time.perf_counter() - start:.0f} s", flush=True)
        for title, rows in found.items():
            print(f"\n{title}; ratios: median (quartiles) of interleaved rounds\n")
            print("\n".join(record.markdown(rows)), flush=True)
        tables |= found
        if options.record:
            record.write_unfinished(name, command, tables, options.record)
    if options.record:
        print(f"\nwritten: {record.write_whole(name, command, tables, options.record)}")
    if broken:
        raise SystemExit(f"failed: {', '.join(broken)}; see above")


if __name__ == "__main__":
    main()

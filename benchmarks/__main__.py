# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu`` and ``gpu``: check every case, time it beside plain torch, record
it; ``batch-size``: runs of a growing batch beside fixed ones, and critical batch sizes by branches.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import batch_size, cases, gpu, measure, record

PARTS = ("step", "estimator", "memory", "layers", "operator")
GPU_PARTS = ("correctness", "ops", "routes", "attention", "cuda", "step")


def step(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        contestants = {"plain": cases.training_step(False), "gnsfast": cases.training_step(True)}
        timings = measure.interleave(contestants, rounds)
        row = {"threads": n, "plain ms": round(timings["plain"].milliseconds, 1)}
        rows.append({**row, "gnsfast / plain": str(timings["gnsfast"])})
    return rows


def estimator(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        step, spent = cases.estimated_step()
        step()
        before, start = spent(), time.perf_counter()
        for _ in range(rounds):
            step()
        seconds, own = time.perf_counter() - start, spent() - before
        row = {"threads": n, "step ms": round(1e3 * seconds / rounds, 1)}
        row |= {"estimator ms": round(1e3 * own / rounds, 2)}
        rows.append({**row, "share": f"{own / seconds:.2%}"})
    return rows


def memory(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n in threads:
        plain, ours = measure.peak_memory(False, n), measure.peak_memory(True, n)
        row = {"threads": n, "plain MiB": round(plain), "gnsfast MiB": round(ours)}
        rows.append({**row, "gnsfast / plain": f"{ours / plain:.3f}"})
    return rows


def layers(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for case in cases.LAYERS:
        row: dict[str, Any] = {"layer, forward and backward": case.name, "route": cases.route(case)}
        for n in threads:
            torch.set_num_threads(n)
            timings = measure.interleave(cases.layer_passes(case), rounds)
            row[f"plain ms ({n})"] = round(timings["plain"].milliseconds, 1)
            row[f"gnsfast / plain ({n})"] = str(timings["gnsfast"])
        rows.append(row)
    return rows


def operator(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for case in cases.LAYERS:
        for n in threads:
            torch.set_num_threads(n)
            timings = measure.interleave(cases.weight_gradients(case), max(2, rounds // 3))
            row: dict[str, Any] = {"weight gradient": case.name, "threads": n}
            row |= {"route": cases.route(case), "plain ms": round(timings["plain"].milliseconds, 1)}
            rows.append(row | {k: f"{t.ratio:.2f}" for k, t in timings.items() if k != "plain"})
    return rows


TITLES = {
    "step": "Whole training step of a small GPT",
    "estimator": "The estimator's own time in that step, without the layers",
    "memory": "Peak memory of that step",
    "layers": "Single layers",
    "operator": "The weight gradient alone, as ratios to plain dW",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    devices = parser.add_subparsers(dest="device", required=True)
    on_cpu = devices.add_parser("cpu", help="whole steps and single layers on this CPU")
    on_cpu.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    on_cpu.add_argument("--rounds", type=int, default=15)
    on_cpu.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    on_cpu.add_argument("--record", type=Path, help="folder for the record, else only printed")
    on_gpu = devices.add_parser("gpu", help="the kernels on this GPU: right, then fast")
    on_gpu.add_argument("--only", choices=GPU_PARTS, nargs="+", default=GPU_PARTS)
    on_gpu.add_argument("--record", type=Path, default=record.RESULTS, help="folder of the record")
    sizes = devices.add_parser("batch-size", help="what a controlled batch size does; 30 minutes")
    sizes.add_argument("--steps", type=int, default=batch_size.STEPS, help="of the small batch")
    sizes.add_argument("--seeds", type=int, default=batch_size.SEEDS)
    sizes.add_argument("--only", choices=("runs", "repeats"), nargs="+", default=("runs",))
    sizes.add_argument("--runs", type=Path, required=True, help="folder for logs and branches")
    sizes.add_argument("--record", type=Path, help="folder for the record, else only printed")
    options = parser.parse_args(arguments)
    {"cpu": run_cpu, "gpu": run_gpu, "batch-size": run_batch_size}[options.device](options)


def run_gpu(options: argparse.Namespace) -> None:
    """Part by part, a record after each: an interrupted run keeps what it has."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False")
    short = []
    for part in options.only:
        start = time.perf_counter()
        tables = getattr(gpu, part)("cuda")
        print(f"\n{part}: {time.perf_counter() - start:.0f} s")
        for title, rows in tables.items():
            print(f"\n{title}\n")
            print("\n".join(record.markdown(rows)), flush=True)
        command = f"python -m benchmarks gpu --only {part}"
        print(f"\nwritten: {record.write('gpu-' + part, command, tables, options.record)}")
        short += gpu.summary(tables)
    print("\nIn short\n\n" + "\n".join(record.markdown(short)))


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
    measure.check()
    print("norms checked against single samples")
    tables = {}
    for part in options.only:
        rows = globals()[part](options.threads, options.rounds)
        tables[TITLES[part]] = rows
        print(f"\n{TITLES[part]}; ratios: median (quartiles) of interleaved rounds\n")
        print("\n".join(record.markdown(rows)), flush=True)
    if options.record:
        command = " ".join(["python -m benchmarks", *sys.argv[1:]])
        name = "-".join(["cpu", *(options.only if set(options.only) != set(PARTS) else ())])
        print(f"\nwritten: {record.write(name, command, tables, options.record)}")


if __name__ == "__main__":
    main()

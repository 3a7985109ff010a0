# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu``: check every case, time it beside plain torch, record it."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measure, record

PARTS = ("step", "estimator", "memory", "layers", "operator")


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("device", choices=["cpu"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument(
        "--record", type=Path, help="folder for the record, else it is only printed"
    )
    options = parser.parse_args()
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

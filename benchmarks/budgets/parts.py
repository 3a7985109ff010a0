# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks budgets``: what is counted here beside what is committed."""

import argparse
import shutil
from collections.abc import Iterator

from benchmarks import budget, kernel_tables, record
from benchmarks.budget import Budget
from benchmarks.budgets import instructions, launches

PARTS = ("instructions", "launches", "triton", "cuda")


def counted(part: str) -> Iterator[tuple[str, Budget]]:
    """A part's budgets by name, one after the other."""
    if part == "instructions":
        yield part, instructions.count()
    elif part == "launches":
        yield part, launches.count()
    elif part == "triton":
        for capability in kernel_tables.CAPABILITIES:
            rows = kernel_tables.triton_rows(capability)
            yield f"{part}-sm_{capability}", kernel_tables.triton_budget(rows)
    else:
        yield part, kernel_tables.cuda_budget()


def missing(part: str) -> str:
    """Why a part cannot be counted here; empty where it can."""
    if part == "instructions":
        return instructions.missing()
    if part == "cuda" and shutil.which("nvcc") is None:
        return "there is no nvcc"
    return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--write", action="store_true", help="what is counted becomes the budget")


def run(options: argparse.Namespace) -> None:
    short, grown = [], []
    for part in options.only:
        if why := missing(part):
            short.append(f"{part}: not counted: {why}")
            continue
        for name, now in counted(part):
            then = now if options.write else budget.read(name)
            print(f"\n{name}, {now.versions}\n")
            print("\n".join(record.markdown(budget.table(then, now))), flush=True)
            if options.write:
                short.append(f"{name}: written to {now.write(name)}")
            elif why := budget.unlike(then, now):
                short.append(f"{name}: not compared: {why}; to renew it: {budget.renew(name)}")
            else:
                grown += (found := budget.complaints(then, now))
                left_out = budget.not_compared(then, now).items()
                notes = [f"; {column} is not compared: {why}" for column, why in left_out]
                short.append(
                    f"{name}: " + ("\n".join(found) or "within its margins") + "".join(notes)
                )
    print("\n" + "\n".join(short))
    if grown:
        raise SystemExit(1)

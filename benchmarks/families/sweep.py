# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks families``: of which architectures of transformers and timm gnsfast gives
every sample's norm, with nothing done to the model. Each is built and judged in a process of its
own: one that hangs, or that ends it, is a row.
"""

import argparse
import importlib.metadata
import multiprocessing
import os
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import record
from benchmarks.families import of_timm

SECONDS = 120
"""After which a model's process ends; most take a third of one."""
IMPORTED = ("torch._dynamo", "transformers.models.llama.modeling_llama")
"""What most models import, before the processes fork: it takes ten times as long as a verdict."""
MEMORY = 16 << 30
"""Bytes of address space of such a process; those that torch reserves count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], help="model types, or classes")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    record.add_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    if of_timm.version():
        importlib.import_module("timm")
    from benchmarks.families.models import families  # needs transformers

    some = set(options.only)
    rows = []
    for family in families():
        if not some or some & {family.model_type, family.name}:
            start = time.perf_counter()
            rows.append(alone(family, options.seed))
            seconds = time.perf_counter() - start
            print(f"{seconds:5.1f} s", *map(record.shown, rows[-1].values()), sep=" | ", flush=True)
    tables = {**summary(rows), "Architectures": rows}
    words = ["--only", *options.only] if some else []
    words += ["--seed", str(options.seed)] if options.seed else []
    command = " ".join(["python -m benchmarks families", *words])
    name = "cpu-families-some" if some else "cpu-families"
    record.publish(name, command, tables, options.record)


def alone(family: Any, seed: int = 0) -> dict[str, Any]:
    """The row of an architecture from a process of its own. It is forked from this one, in which
    torch and transformers are imported but no backward pass has run.
    """
    from benchmarks.families.judge import Verdict, row

    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_judge, args=(family, seed, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            found: dict[str, Any] = receiver.recv()
            return found
        ended = Verdict("no answer", f"within {SECONDS} s")
    except EOFError:
        process.join()
        ended = Verdict("no answer", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return row(family, None, ended)


def _judge(family: Any, seed: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    from benchmarks.families import judge

    try:
        found = judge.row_of(family, seed)
    except Exception as error:  # the other architectures still have their rows
        ended = judge.Verdict("no answer", judge.said(error))
        found = judge.row(family, None, ended)
    sender.send(found)


def _named(row: dict[str, Any]) -> str:
    """What a table calls an architecture: timm's have no type."""
    name: str = row["architecture" if row["model type"] == "timm" else "model type"]
    return name


def summary(rows: record.Rows) -> record.Tables:
    """How many architectures got each verdict, and for each cause which."""
    from benchmarks.families.judge import causes

    words = Counter(row["verdict"] for row in rows)
    verdicts = [{"verdict": word, "architectures": n} for word, n in words.most_common()]
    timm = of_timm.version() or "(not installed, so not swept)"
    of = f"architectures of transformers {importlib.metadata.version('transformers')}, timm {timm}"
    tables = {f"Verdicts on {len(rows)} {of}": verdicts}
    shares = {"all": 1.0, "99 % or more": 0.99, "90 % or more": 0.9, "any share": 0.0}
    covered = [row["covered"] for row in rows if row["verdict"] == "right"]
    tables["Elements that are covered where the norms are right"] = [
        {"covered": share, "architectures": sum(each >= least for each in covered)}
        for share, least in shares.items()
    ]
    who: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for each in sorted(causes(row["why"])):
            who.setdefault((row["verdict"], each), []).append(_named(row))
    tables["Causes"] = [
        {"architectures": len(types), "verdict": word, "cause": each, "which": ", ".join(types)}
        for (word, each), types in sorted(who.items(), key=lambda item: -len(item[1]))
    ]
    return tables

# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu`` and ``gpu``: check every contestant, time it beside plain torch,
record it; ``batch-size``: runs of a growing batch beside fixed ones, and critical batch sizes by
branches; ``geometry``: which noise scale follows it; ``model``: what norms cost on a GPU, counted;
``families``: of which of transformers' architectures the norms are right; ``intervals``: whether
those of noise scales hold the truth; ``present``: whether they do at the weights of a training run;
``updates``: what whole updates of small models cost; ``host``: what a
layer costs in Python; ``broken-samples``: whether samples with large
gradients are the broken ones; ``clusters``: what those of samples cost.
"""

import argparse
from typing import Any

import torch

from benchmarks import compare, readme, record
from benchmarks.budgets import parts as budgets
from benchmarks.cpu import host, updates
from benchmarks.cpu import parts as cpu
from benchmarks.families import sweep
from benchmarks.gpu import parts as gpu
from benchmarks.model import tables as model
from benchmarks.studies import batch_size, broken_samples, clusters, geometry, intervals, present


class Study:
    """A module whose ``tables`` are printed, and recorded where the user asks for it."""

    def __init__(self, module: Any) -> None:
        self.tables = module.tables

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        record.add_argument(parser)

    def run(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        name = options.device
        how = f"cpu-{name}", f"python -m benchmarks {name}"
        record.publish(*how, self.tables(), options.record)


COMMANDS: dict[str, tuple[Any, str]] = {
    "cpu": (cpu, "all contestants on this CPU; half an hour"),
    "gpu": (gpu, "the kernels on this GPU: right, then fast"),
    "batch-size": (batch_size, "what a controlled batch size does; 30 minutes"),
    "geometry": (geometry, "which noise scale follows it"),
    "intervals": (Study(intervals), "do they hold the truth"),
    "present": (Study(present), "do they hold it at the present weights; minutes"),
    "broken-samples": (Study(broken_samples), "are the largest gradients theirs; a minute"),
    "clusters": (Study(clusters), "of samples: what they cost; a minute"),
    "updates": (updates, "of small models; two minutes"),
    "host": (host, "what a layer costs in Python; a minute"),
    "families": (sweep, "what of transformers is right"),
    "model": (model, "what norms cost on a GPU, counted"),
    "budgets": (budgets, "committed counts that may not grow"),
    "compare": (compare, "two records: what changed by more than its noise"),
    "readme": (readme, "writes the README's table and figure from the records"),
}
"""Each a module, or a ``Study``, with ``add_arguments`` and ``run``."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="device", required=True)
    for name, (module, about) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=about))
    options = parser.parse_args(arguments)
    COMMANDS[options.device][0].run(options)


if __name__ == "__main__":
    main()

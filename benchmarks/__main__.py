# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu`` and ``gpu``: check every contestant, time it beside plain torch,
record it; ``families``: of which of transformers' architectures the norms are right;
``intervals``: whether those of noise scales hold the truth; ``present``: whether they do at the
weights of a training run; ``chosen``: the batch of gnsfast, nanochat and Step Law, and its loss;
``bits``: whether losses stay the same; ``passes``: what ``source="local"`` costs; ``updates``: what
whole updates of small models cost; ``host``: what a layer costs in Python.
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
from benchmarks.studies import bits, chosen, intervals, passes, present


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
    "intervals": (Study(intervals), "do they hold the truth"),
    "present": (Study(present), "do they hold it at the present weights; minutes"),
    "chosen": (Study(chosen), "the batch by gnsfast, nanochat and Step Law; minutes"),
    "bits": (Study(bits), "whether losses stay the same to the last bit; minutes"),
    "passes": (Study(passes), "what each pass by itself costs in precision; seconds"),
    "updates": (updates, "of small models; two minutes"),
    "host": (host, "what a layer costs in Python; a minute"),
    "families": (sweep, "what of transformers is right"),
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

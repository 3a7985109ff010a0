# SPDX-License-Identifier: Apache-2.0
"""What norms add to the launches of a training step on a GPU, counted without one: each operator
that PyTorch dispatches is one, and so is each launch of Triton's. Views, and tensors that are only
made, count nothing.

``count()`` runs this file in a process of its own, which takes tensors on the CPU for those of a
GPU. An operator may launch several kernels, as a sort does; it does so in plain PyTorch too.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gnsfast
from benchmarks import apart
from benchmarks.budget import Budget, Rows
from benchmarks.networks import NarrowGPT2, gpt_case, perceptron_case
from gnsfast.ops import backends
from gnsfast.signatures import OPERATORS

MADE = ("empty", "new_empty", "detach", "_unsafe_view", "sym_", "is_")
"""Beginnings of the names of operators that launch nothing, beside views."""


class Launches(TorchDispatchMode):
    """Counts by name what is dispatched inside its block, also by gnsfast's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def triton(self, x: int, y: int, z: int, *args: Any) -> None:
        """In the place of a launch."""
        self.counts["triton"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "gnsfast":
            with self:
                return backends.implementation(name, "cpu")(OPERATORS[name](*args))
        aliases = [result.alias_info for result in func._schema.returns]
        view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        if not view and not name.startswith(MADE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def of(self, run: Callable[[], object]) -> int:
        """What ``run`` launches."""
        self.counts.clear()
        with self:
            run()
        return self.counts.total()


def cases() -> dict[str, tuple[Any, Any, tuple[torch.Tensor, ...]]]:
    return {"GPT-2": gpt_case(NarrowGPT2), "Perceptron": perceptron_case()}


def tables() -> dict[str, gnsfast.Table]:
    """What is learnt of each model, before nothing is computed any more."""
    return {name: gnsfast.learn(make(), batch[0]) for name, (make, _, batch) in cases().items()}


def rows(launches: Launches, tables: Mapping[str, gnsfast.Table]) -> Rows:
    """Forward and backward, plain; with a noise scale, while parameters are audited and later; and
    with every sample's norms.
    """
    found: Rows = {}
    for name, (make, loss_of, batch) in cases().items():
        plain, ours, samples = make(), make(), len(batch[0])
        gns = gnsfast.GradientNoiseScale(ours, tables[name])

        def step() -> None:
            with gns.update(samples):  # noqa: B023
                loss_of(ours, batch).backward()  # noqa: B023
            ours.zero_grad()  # noqa: B023

        step()  # makes the probes, once
        before = launches.of(lambda: loss_of(plain, batch).backward())  # noqa: B023
        audited = launches.of(step)
        step()  # the last of the first three, which are audited
        for row, count in ((f"{name}, audited", audited), (name, launches.of(step))):
            found[row] = {"plain": before, "gnsfast": count, "launches": count - before}
    return found


def count() -> Budget:
    """What is counted here; needs Triton."""
    import triton

    environment = apart.without_settings(
        GNSFAST_BACKEND="triton", GNSFAST_AUTOTUNE="0", TRITON_INTERPRET="0"
    )
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return Budget(versions, json.loads(apart.printed("budgets.launches", environment=environment)))


if __name__ == "__main__":
    from benchmarks import no_gpu

    with patch.dict(os.environ, GNSFAST_BACKEND="reference"):
        learned = tables()
    counter = Launches()
    no_gpu.install("90", 132, counter.triton)
    print(json.dumps(rows(counter, learned)))

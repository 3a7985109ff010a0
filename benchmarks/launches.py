# SPDX-License-Identifier: Apache-2.0
"""What a training step launches on a GPU, counted without one: the operators that PyTorch
dispatches, each as one kernel, and Triton's launches. Views, and tensors that are only made, count
nothing.

An operator may launch several kernels (a sort does). It does so in plain PyTorch too, and what
gnsfast adds are few such operators.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import gnsfast
from benchmarks import no_gpu
from benchmarks.models import gpt_batch, gpt_loss
from benchmarks.steps import NarrowGPT2
from gnsfast.ops import backends
from gnsfast.signatures import OPERATORS

ROOT = Path(__file__).parents[1]
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


def main() -> None:
    launches = Launches()
    no_gpu.install(90, 132, launches.triton)
    plain, ours = NarrowGPT2(), gnsfast.convert(NarrowGPT2())
    batch = gpt_batch(NarrowGPT2)
    gns = gnsfast.GradientNoiseScale(ours)

    def step() -> None:
        with gns.microbatch(NarrowGPT2.B):
            gpt_loss(ours, batch).backward()
        gns.update()
        ours.zero_grad()

    def counted(run: Callable[[], None]) -> Counter[str]:
        launches.counts.clear()
        with launches:
            run()
        return +launches.counts

    backward = lambda: gpt_loss(plain, batch).backward()
    of_plain = counted(backward)
    step()
    for _ in range(2):
        found = counted(step)
        found.subtract(of_plain)
        print(found.total(), {k: v for k, v in found.most_common() if v})


if __name__ == "__main__":
    main()

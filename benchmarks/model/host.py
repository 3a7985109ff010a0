# SPDX-License-Identifier: Apache-2.0
"""What the host does in a training step, counted in instructions, and how long that takes. The
device may wait for it: a step takes as long as the longer of the two.
"""

from functools import cache

from benchmarks.model.plain import MODELS, Model, between, product_kernels

INSTRUCTIONS = {
    "plain step of gpt-2": 30_900_000,
    "plain linear": 73_000,
    "linear": 289_000,
    "norm": 586_000,
    "embedding": 730_000,
    "block": 9_900_000,
}
"""By callgrind on a CPU, eager, with Triton's launches up to the driver. Of a layer and of a block
what they add to plain PyTorch: forward and backward of a layer, the linear one with a bias; a block
is opened and closed, and its update made."""

RATE = 30_900_000 / 7e-3
"""Instructions a second: that plain step takes 7 ms on the host where it was counted."""

OPERATOR = 0.8
"""Of a layer's instructions those in backward, around its operator: 1,125k of 1,398k in a
perceptron. That much is left when Inductor's wrapper calls the operator."""


def seconds(instructions: float) -> float:
    return instructions / RATE


@cache
def eager_kernel() -> float:
    """Instructions of a plain eager kernel: those of GPT-2's step over its kernels."""
    model = MODELS["gpt-2"]
    parts = between(model, 16, 1024, 4, compiled=False)
    kernels = product_kernels(model) + sum(work.kernels for work in parts.values())
    return INSTRUCTIONS["plain step of gpt-2"] / kernels


def plain_instructions(kernels: float, compiled: bool) -> float:
    """In proportion to the kernels. Compiled, each is one call of Inductor's wrapper, taken as a
    quarter of an eager linear layer, whose three products and sum it stands for.
    """
    return kernels * (INSTRUCTIONS["plain linear"] / 4 if compiled else eager_kernel())


def added_instructions(model: Model, compiled: bool) -> float:
    """Beside plain. Compiled, norm layers are plain operations, and so cost no call of ours."""
    norms = 0 if compiled else model.norms * INSTRUCTIONS["norm"]
    layers = model.linears * INSTRUCTIONS["linear"] + model.tables * INSTRUCTIONS["embedding"]
    return INSTRUCTIONS["block"] + (OPERATOR if compiled else 1.0) * layers + norms

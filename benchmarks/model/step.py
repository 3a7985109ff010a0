# SPDX-License-Identifier: Apache-2.0
"""What norms cost a whole training step, counted: each layer's weight gradient by
``model/linear.py``, the other parameters, the estimator, what processes exchange. Then what the
host does, counted in instructions: the device may wait for it.
"""

import math
from dataclasses import dataclass
from functools import cache

from benchmarks.model.gpu import ASSUMED, GPU, Assumed, Work, product_seconds
from benchmarks.model.linear import Cost, Layer, weight_gradient
from benchmarks.model.plain import MODELS, Model, between, product_kernels, products_seconds

NORM_LAUNCHES = {"eager": 0, "compiled": 2}
"""Kernels beside plain ones, of which torch has two as well. Compiled, norm layers are plain
operations that the compiler joins: the squares and the probe's row."""

EMBEDDING_LAUNCHES = {"eager": 2, "compiled": 7}
"""Beside plain ones: keys, and the finishing kernel; that of segments stands for plain's sums.
Compiled, plain needs no sort, which is about five."""

TIED_LAUNCHES = {"eager": 9, "compiled": 4}
"""The gather of dy's columns, the batched product, dW's rows, and the embedding's cross terms with
them: products and sums for the samples and for the sum, laid together and added."""

TIED_PASSES = {"eager": 11, "compiled": 4}
"""How often [B, T, D] float32 moves for a tie: the product writes the head's rows; dW's are read
and written; then twice a product, three, and its sum, one. Compiled, one kernel reads dy, the rows
and dW's."""

ESTIMATOR_LAUNCHES = 7
"""Of ``GradientNoiseScale`` in a step of one micro-batch, whatever the model: four that gather and
add the probes' rows, three for the norms of a few gradients."""

AUDITED = 32
"""The parameters audited in one pass (``probing.gradient_watch.AT_ONCE``), by a kernel each."""

SCALARS = 20
"""Numbers of an update's vector beside two for each parameter and two for each row of a probe."""

SECTOR = 32
"""Bytes that a read of one number takes from memory."""


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


@dataclass(frozen=True)
class Step:
    """Seconds of a training step: the device's, plain, and what is added to it by cause; the
    host's. The longer of the two is how long the step takes.
    """

    device: float
    host: float
    host_added: float
    costs: tuple[Cost, ...]  # of the model's layers, each once
    gradients: float  # all plain weight gradients
    parts: dict[str, float]  # of the plain device time
    added: dict[str, float]

    @property
    def plain(self) -> float:
        return max(self.device, self.host)

    @property
    def ours(self) -> float:
        return max(self.device + sum(self.added.values()), self.host + self.host_added)

    @property
    def bound(self) -> str:
        """Which of the two takes longer, with norms."""
        return "host" if self.ours == self.host + self.host_added else "device"

    @property
    def overhead(self) -> float:
        return self.ours / self.plain - 1

    @property
    def on_device(self) -> float:
        """What norms add to the device's time, of that time."""
        return sum(self.added.values()) / self.device

    @property
    def gradient_overhead(self) -> float:
        return self.added["weight gradients"] / self.gradients


def other_parameters(
    gpu: GPU, model: Model, B: int, T: int, weights: int, mode: str, a: Assumed
) -> dict[str, float]:
    """Norm layers and embeddings: bytes that plain PyTorch does not move, and kernels."""
    n = B * T * model.width
    kinds = 1 + model.norm_bias
    # Each sample's sums, one row at least; eager of so many programs that they fill the device.
    # The kernel that writes them also makes dx: it saves the read of x and dy that torch's has.
    rows = max(B, 4 * gpu.processors) if mode == "eager" else B
    saved = 2 * weights * n if mode == "eager" else 0
    norm = Work(8 * kinds * rows * model.width - saved, NORM_LAUNCHES[mode])
    # dy once more: runs of an id are summed besides segments.
    embedding = Work(weights * n, EMBEDDING_LAUNCHES[mode])
    norms = norm.seconds(gpu, a) + (a.arrival if mode == "eager" else 0.0)
    tables = embedding.seconds(gpu, a) + a.arrival
    return {"norm layers": model.norms * norms, "embeddings": model.tables * tables}


def tie(gpu: GPU, layer: Layer, B: int, T: int, mode: str, a: Assumed) -> float:
    """The rows of a tied head's gradient at the words of each sample, beside its weight gradient
    which takes the route of any other; then their products with the table's own.
    """
    work = tie_work(layer, B, T, mode)
    # The product of a sample is [T, T] x [T, I], float32.
    nbytes = B * T * (2 * T + 2 * layer.I + 4 * layer.I)
    product = product_seconds(gpu, B * T, layer.I, T, nbytes, a)
    return work.seconds(gpu, a) + product


def tie_work(layer: Layer, B: int, T: int, mode: str) -> Work:
    """All but the batched product. A column of dy is a number of each row; ``T`` words drawn evenly
    from the vocabulary touch so many of a row's sectors.
    """
    sectors = 2 * layer.O / SECTOR
    touched = sectors * (1 - (1 - 1 / sectors) ** T) if sectors > 1 else 1.0
    columns = B * T * (SECTOR * touched + 2 * T)
    passes = TIED_PASSES[mode] - 1  # the first is the product's own
    return Work(columns + passes * 4 * B * T * layer.I, TIED_LAUNCHES[mode])


def audit_work(model: Model, weights: int) -> Work:
    """A pass that audits: an average share of the gradients is read once more. What the host does
    for that was not counted.
    """
    audited = min(AUDITED, model.units)
    return Work(weights * model.parameters * audited / model.units, audited)


def estimator_work(model: Model, B: int) -> Work:
    """The slab written, read and zeroed, as one; small kernels."""
    return Work(4 * model.units * (B + 2) * 4, ESTIMATOR_LAUNCHES)


def exchange_bytes(model: Model) -> int:
    """The one vector that processes add up: float64 p and q of parameters, calls of probe rows."""
    return 8 * (4 * model.units + SCALARS)


def communication_seconds(
    gpu: GPU, model: Model, world: int, weights: int, a: Assumed, sharded: bool
) -> float:
    """Of several processes: q from the final gradients, a shard of them or all, and an all-reduce
    of one vector; latency, and bytes over NVLink.
    """
    if world == 1:
        return 0.0
    read = weights * model.parameters / (world if sharded else 1)
    vector = 2 * (world - 1) / world * exchange_bytes(model) / gpu.nvlink
    latency = 2 * math.ceil(math.log2(world)) * a.hop
    return read / (a.memory * gpu.memory) + vector + latency


def host_seconds(instructions: float) -> float:
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


def step(
    gpu: GPU,
    model: Model,
    T: int,
    B: int,
    *,
    world: int = 1,
    weights: int = 4,
    kernel: str = "triton",
    a: Assumed = ASSUMED,
    sharded: bool = True,
    compiled: bool = False,
    audit: bool = False,
) -> Step:
    """One micro-batch of B samples of T tokens on each of ``world`` processes."""
    mode = "compiled" if compiled else "eager"
    shards = world if sharded else 1
    costs = tuple(
        weight_gradient(gpu, layer, T, B, weights=weights, kernel=kernel, a=a, compiled=compiled)
        for layer in model.layers
    )
    counts = [layer.count for layer in model.layers]
    tied = (layer for layer in model.layers if layer.tied)
    added = {
        "weight gradients": sum(n * c.more for n, c in zip(counts, costs)),
        **other_parameters(gpu, model, B, T, weights, mode, a),
        "tied head": sum(tie(gpu, layer, B, T, mode, a) for layer in tied),
        "estimator": estimator_work(model, B).seconds(gpu, a),
        "processes": communication_seconds(gpu, model, world, weights, a, sharded),
    }
    if audit:
        added["audit"] = audit_work(model, weights).seconds(gpu, a)
    parts = between(model, B, T, weights, compiled, shards)
    device = {"products, attention": products_seconds(gpu, model, B, T, a)}
    device |= {part: work.seconds(gpu, a) for part, work in parts.items()}
    kernels = product_kernels(model) + sum(work.kernels for work in parts.values())
    return Step(
        sum(device.values()),
        host_seconds(plain_instructions(kernels, compiled)),
        host_seconds(added_instructions(model, compiled)),
        costs,
        sum(n * c.plain for n, c in zip(counts, costs)),
        device,
        added,
    )

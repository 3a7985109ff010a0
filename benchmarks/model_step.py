# SPDX-License-Identifier: Apache-2.0
"""What norms cost a whole training step, counted: each layer's weight gradient by
``model_linear.py``, the other parameters, the estimator, and what processes exchange.
"""

import math
from dataclasses import dataclass

from benchmarks.model_linear import ASSUMED, GPU, Assumed, Cost, Layer, weight_gradient


@dataclass(frozen=True)
class Model:
    """A transformer by its parameters: linear layers, embeddings, and ``norms`` norm layers."""

    name: str
    layers: tuple[Layer, ...]
    blocks: int
    width: int
    vocabulary: int
    positions: int
    norms: int
    norm_bias: bool

    @property
    def linear_parameters(self) -> int:
        return sum(layer.count * layer.I * layer.O for layer in self.layers)

    @property
    def parameters(self) -> int:
        biases = sum(layer.count * layer.O for layer in self.layers if layer.bias)
        tied = any(layer.tied for layer in self.layers)
        tables = (0 if tied else self.vocabulary) + self.positions
        gains = self.norms * (2 if self.norm_bias else 1)
        return self.linear_parameters + biases + (tables + gains) * self.width

    @property
    def modules(self) -> int:
        """Modules with a probe."""
        tables = 1 + bool(self.positions)
        return sum(layer.count for layer in self.layers) + tables + self.norms

    @property
    def units(self) -> int:
        """Trainable parameters, each with its own p and q."""
        linears = sum(layer.count * (1 + layer.bias - layer.tied) for layer in self.layers)
        return linears + 1 + bool(self.positions) + self.norms * (1 + self.norm_bias)


MODELS = {
    model.name: model
    for model in (
        Model(
            "gpt-2",
            (
                Layer("qkv", 768, 2304, 12, bias=True),
                Layer("out", 768, 768, 12, bias=True),
                Layer("up", 768, 3072, 12, bias=True),
                Layer("down", 3072, 768, 12, bias=True),
                Layer("head, tied", 768, 50304, tied=True),
            ),
            *(12, 768, 50304, 1024, 25, True),
        ),
        Model(
            "llama-3-8b",
            (
                Layer("q", 4096, 4096, 32),
                Layer("k, v", 4096, 1024, 64),
                Layer("out", 4096, 4096, 32),
                Layer("gate, up", 4096, 14336, 64),
                Layer("down", 14336, 4096, 32),
                Layer("head", 4096, 128256),
            ),
            *(32, 4096, 128256, 0, 65, False),
        ),
    )
}

BIAS_LAUNCHES = 10
NORM_LAUNCHES = {False: 12, True: 23}  # RMS norm; layer norm with its bias
EMBEDDING_LAUNCHES = 13
TIED_LAUNCHES = 10
"""Kernels beside those of plain PyTorch, eager: compiled, norm layers are plain operations that the
compiler joins."""

ESTIMATOR_LAUNCHES = 105
"""Of ``GradientNoiseScale`` in a step of one micro-batch, whatever the model."""

SCALARS = 19
"""Numbers of an update's vector beside two for each parameter and two for each row of a probe."""


@dataclass(frozen=True)
class Step:
    """Seconds of a training step, plain, and what is added to it, by cause. The optimizer and what
    is between the matrix products are not in ``plain``.
    """

    plain: float
    costs: tuple[Cost, ...]  # of the model's layers, each once
    gradients: float  # all plain weight gradients
    added: dict[str, float]

    @property
    def overhead(self) -> float:
        return sum(self.added.values()) / self.plain

    @property
    def gradient_overhead(self) -> float:
        return self.added["weight gradients"] / self.gradients


def attention_flop(model: Model, B: int, T: int) -> float:
    """Causal: half of 4 T² D forward; backward 2.5 times that, as scores are recomputed."""
    return 3.5 * model.blocks * 2 * B * T * T * model.width


def plain_seconds(gpu: GPU, model: Model, B: int, T: int, a: Assumed) -> float:
    """6 x parameters x tokens, and attention."""
    products = 6 * model.linear_parameters * B * T / (a.gemm * gpu.flops)
    return products + attention_flop(model, B, T) / (a.attention * gpu.flops)


def other_parameters(
    gpu: GPU, model: Model, B: int, T: int, weights: int, a: Assumed
) -> dict[str, float]:
    """Biases, norm layers, embeddings: bytes that plain PyTorch does not move, and kernels."""
    bandwidth = a.memory * gpu.memory
    biases = [(layer.count, layer.O) for layer in model.layers if layer.bias]
    bias = sum(n * (12 * B * O / bandwidth + BIAS_LAUNCHES * a.kernel) for n, O in biases)
    kinds = 1 + model.norm_bias
    # Each sample's gains: partial sums of at least one program a sample, written and read twice.
    norm_bytes = 12 * kinds * max(B, 2 * gpu.processors) * model.width
    norm = model.norms * (norm_bytes / bandwidth + NORM_LAUNCHES[model.norm_bias] * a.kernel)
    tables = 1 + bool(model.positions)
    rows = 2 * B * T * model.width  # dy once more: runs of an id are summed besides segments
    embedding = tables * (rows / bandwidth + EMBEDDING_LAUNCHES * a.kernel)
    for layer in model.layers:
        if layer.tied:
            # Rows of the head's gradient, float32: stored, gathered, read; slots [B, V].
            link = 16 * B * T * layer.I + 8 * B * layer.O + 2 * weights * B * T * layer.I
            embedding += link / bandwidth + TIED_LAUNCHES * a.kernel
    return {"biases": bias, "norm layers": norm, "embeddings, tie": embedding}


def estimator_seconds(gpu: GPU, model: Model, B: int, a: Assumed) -> float:
    """The slab zeroed, added to and read; small kernels, and one for each module's row."""
    slab = 4 * model.units * (B + 2) * 4
    return slab / (a.memory * gpu.memory) + (ESTIMATOR_LAUNCHES + model.modules) * a.kernel


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
) -> Step:
    """One micro-batch of B samples of T tokens on each of ``world`` processes."""
    costs = tuple(
        weight_gradient(gpu, layer, T, B, weights=weights, kernel=kernel, a=a)
        for layer in model.layers
    )
    counts = [layer.count for layer in model.layers]
    added = {
        "weight gradients": sum(n * c.more for n, c in zip(counts, costs)),
        **other_parameters(gpu, model, B, T, weights, a),
        "estimator": estimator_seconds(gpu, model, B, a),
        "processes": communication_seconds(gpu, model, world, weights, a, sharded),
    }
    gradients = sum(n * c.plain for n, c in zip(counts, costs))
    return Step(plain_seconds(gpu, model, B, T, a), costs, gradients, added)

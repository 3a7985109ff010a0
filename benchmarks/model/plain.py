# SPDX-License-Identifier: Apache-2.0
"""A whole plain training step on a GPU, counted: matrix products, attention, and the bytes and
kernels of all that lies between, eager or compiled. Pure arithmetic; nothing here was measured.

Legend: n = B T D elements of the residual stream, s bytes of one of them: 4 under autocast, where
embeddings are float32, else 2. What matrix products read and write has two bytes.
"""

import math
from dataclasses import dataclass

from benchmarks.model.gpu import GPU, Assumed, Work, product_seconds
from benchmarks.model.linear import BIAS_LAUNCHES, Layer


@dataclass(frozen=True)
class Model:
    """A transformer by its parameters: linear layers, embeddings, and ``norms`` norm layers, two a
    block and a last one. ``readers``: layers that read the block's first and its second norm.
    """

    name: str
    layers: tuple[Layer, ...]
    blocks: int
    width: int
    vocabulary: int
    positions: int
    norms: int
    norm_bias: bool
    inner: int  # width of the feed-forward layer
    gated: bool  # SwiGLU, else GELU
    rotated: int  # features of queries and keys together with rotary positions
    readers: tuple[int, int]

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
    def tables(self) -> int:
        return 1 + bool(self.positions)

    @property
    def linears(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def units(self) -> int:
        """Trainable parameters, each with its own p and q."""
        linears = sum(layer.count * (1 + layer.bias - layer.tied) for layer in self.layers)
        return linears + self.tables + self.norms * (1 + self.norm_bias)


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
            *(3072, False, 0, (1, 1)),
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
            *(14336, True, 5120, (3, 2)),
        ),
    )
}


def attention_flop(model: Model, B: int, T: int) -> float:
    """Causal: half of 4 T² D forward; backward 2.5 times that, as scores are recomputed."""
    return 3.5 * model.blocks * 2 * B * T * T * model.width


ATTENTION_LAUNCHES = 4
"""Forward; backward's preparation, its pass, and dq's cast."""

EMBEDDING_LAUNCHES = {"eager": 10, "compiled": 2}
"""A table's backward: the zeros; eager a sort of about five kernels, runs of an id, their sums;
compiled one kernel of atomic additions."""

NORM_LAUNCHES = 2
"""torch's layer norm and RMS norm, backward, up to 65536 rows: dx, and gain and bias. The second
reads x and dy again."""


def products_seconds(gpu: GPU, model: Model, B: int, T: int, a: Assumed) -> float:
    """Forward, dx and dW of every linear layer, in waves of tiles, and attention."""
    N, seconds = B * T, attention_flop(model, B, T) / (a.attention * gpu.flops)
    for layer in model.layers:
        I, O = layer.I, layer.O
        nbytes = 2 * (N * (I + O) + I * O)
        shapes = ((N, O, I), (N, I, O), (O, I, N))
        each = sum(product_seconds(gpu, *shape, nbytes, a) for shape in shapes)
        seconds += layer.count * each
    return seconds + product_kernels(model) * a.kernel


def product_kernels(model: Model) -> int:
    return 3 * model.linears + ATTENTION_LAUNCHES * model.blocks


def between(
    model: Model, B: int, T: int, weights: int, compiled: bool, shards: int = 1
) -> dict[str, Work]:
    """What lies between the products, a part each. ``weights``: bytes of an element of a weight, 2,
    or 4 under autocast. Each of ``shards`` processes updates its share of the parameters.

    Eager, a kernel for each operation of torch's own modules, rotary positions as transformers
    writes them. Compiled, as Inductor joins them: what lies between two products is one kernel that
    reads its inputs and writes its outputs once; sums over tokens are kernels of their own, in two
    stages. torch's fused AdamW is the same in both. Gradients are set to None: no bytes.
    """
    parts = (compiled_parts if compiled else eager_parts)(model, B * T, weights)
    parts |= {"weights' casts": weight_casts(model, B * T, weights, compiled)}
    return parts | {"optimizer": adamw(model, weights, shards)}


def eager_parts(model: Model, N: int, s: int) -> dict[str, Work]:
    """Bytes an element, then kernels, of each operation; ``N`` tokens."""
    autocast = s == 4
    n, inner, logits = N * model.width, N * model.inner, N * model.vocabulary
    joins, read = 2 * model.blocks, sum(model.readers)
    casts = Work((s + 2) * n, 1) * autocast
    norm = Work((2 * s + 3 * s + 2 * s) * n, 1 + NORM_LAUNCHES)  # forward; dx; gain and bias
    # A residual addition, and the sum of its two gradients; those of a norm's several readers.
    add = Work((s + 2 + s) * n, 1) + Work(3 * s * n, 1)
    readers = Work(3 * s * n, 1) * (read - 2)
    if model.gated:  # silu, the product; both gradients of the product, silu's
        activation = Work((4 + 6 + 6 + 6 + 6) * inner, 5)
    else:
        activation = Work((4 + 6) * inner, 2)
    stack = Work(12 * n, 1) * (model.readers[0] == 1)  # dq, dk, dv become one gradient
    # x cos + (-x_2, x_1) sin: two products, negation, concatenation, sum; and backward.
    rotary = Work((20 + 30) * N * model.rotated, 2 * (5 + 9)) * bool(model.rotated)
    # log_softmax keeps bfloat16 logits, nll_loss widens them; zeros and nll's gradient, narrowed.
    loss = Work(4 + 6 + 4 + 6 + 6, 8) if autocast else Work(4 + 2 + 6, 6)
    return {
        "norms": norm * model.norms,
        "residual sums": add * joins + readers * model.blocks,
        "activations' casts": casts * (2 * (model.blocks * read + 1) + joins),
        "activation": activation * model.blocks,
        "heads": (stack + rotary) * model.blocks,
        "loss": Work(loss.nbytes * logits, loss.kernels),
        "embeddings": embeddings(model, n, s, "eager", forward=Work(2 * s * n, 1)),
    }


def compiled_parts(model: Model, N: int, s: int) -> dict[str, Work]:
    n, inner, logits = N * model.width, N * model.inner, N * model.vocabulary
    cast = 2 if s == 4 else 0
    read = 2 * (model.blocks * sum(model.readers) + 1)  # bytes of dy, of all norms together
    # The sum with the branch before it; backward, the sum of gradients with it.
    forward = Work((s + 2 + s + 2) * n, 1) * model.norms
    backward = Work((3 * s + cast) * n, 1) * model.norms + Work(read * n, 0)
    gains = Work(s * n, 2) * model.norms + Work(read * n, 0)
    activation = Work((6 + 10 if model.gated else 4 + 6) * inner, 2)
    stack = Work(12 * n, 1) * (model.readers[0] == 1)
    rotary = Work((4 + 4) * N * model.rotated, 2) * bool(model.rotated)
    return {
        "norms, residual sums": forward + backward + gains,
        "activation": activation * model.blocks,
        "heads": (stack + rotary) * model.blocks,
        "loss": Work((2 + 2 + 2) * logits, 3),
        "embeddings": embeddings(model, n, s, "compiled", forward=Work(s * n, 0)),
    }


def embeddings(model: Model, n: int, s: int, mode: str, forward: Work) -> Work:
    """``forward`` of each table; backward reads dy and adds its rows to zeros."""
    found = (forward + Work(2 * s * n, EMBEDDING_LAUNCHES[mode])) * model.tables
    rows = model.vocabulary + model.positions
    found += Work(s * rows * model.width)
    if model.positions and mode == "eager":
        found += Work(3 * s * n, 1)  # the sum of both
    if any(layer.tied for layer in model.layers):
        found += Work(3 * s * model.vocabulary * model.width, 1)  # dW of head and table
    return found


def weight_casts(model: Model, N: int, weights: int, compiled: bool) -> Work:
    """Weights narrowed forward, gradients widened backward; biases' gradients, which read dy."""
    autocast = weights == 4
    biased = [layer for layer in model.layers if layer.bias]
    biases = sum(layer.count for layer in biased)
    kernels = BIAS_LAUNCHES["compiled plain" if compiled else "plain"]
    kernels -= not compiled and not autocast
    found = Work(2 * N * sum(layer.count * layer.O for layer in biased), kernels * biases)
    if autocast:
        found += Work(6 * model.linear_parameters, model.linears) * 2
        found += Work(0, biases)  # narrowed
    return found


def adamw(model: Model, weights: int, shards: int) -> Work:
    """Fused: weight, gradient and two moments read, all but the gradient written. A kernel takes
    320 chunks of 65536 elements and 36 tensors; one more counts steps.
    """
    mine = math.ceil(model.parameters / shards)
    kernels = max(math.ceil(mine / 65536 / 320), math.ceil(model.units / 36))
    return Work(7 * weights * mine, kernels + 1)

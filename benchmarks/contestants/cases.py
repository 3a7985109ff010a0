# SPDX-License-Identifier: Apache-2.0
"""What is measured: whole training steps, single layers, and weight gradients alone, named after
the models that they come from.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.contestants import Contestant, Loss, Session
from benchmarks.networks import GPT, Perceptron, gpt_batch, gpt_loss
from examples.tiny_gpt import Block
from gnsfast import reference
from gnsfast.ops import backends, cpu, operators
from gnsfast.reference.outer import linear_route
from gnsfast.signatures import LinearWgrad

TOKENS = 4096
"""Tokens of a batch in the cases of single layers; a sample has T of them."""


@dataclass(frozen=True)
class LayerCase:
    """A linear layer [O, I] over ``tokens`` tokens in samples of T."""

    model: str
    I: int
    O: int
    T: int
    tokens: int = TOKENS

    @property
    def layer(self) -> str:
        return f"{self.model} {self.I}x{self.O}"

    @property
    def name(self) -> str:
        return f"{self.layer} T={self.T}"

    @property
    def B(self) -> int:
        return max(1, self.tokens // self.T)


UP = ("GPT-2 up", 768, 3072)
LLAMA = ("Llama-3-8B up", 4096, 14336)
OVER_T = [LayerCase(*UP, T) for T in (1, 4, 16, 64, 256, 1024, 4096)]
OVER_B = [LayerCase(*UP, 256, 256 * B) for B in (1, 2, 4, 8, 16, 32)]
LAYERS = [
    LayerCase("GPT-2 out", 768, 768, 128),
    LayerCase("GPT-2 out", 768, 768, 1024),
    LayerCase("small GPT head", 384, 4096, 256),
    LayerCase("Llama-3-8B out", 4096, 4096, 256, 512),
    LayerCase(*LLAMA, 64, 128),
]
OPERATOR = [
    LayerCase(model, I, O, T)
    for model, I, O in (("GPT-2 out", 768, 768), UP, ("small GPT head", 384, 4096))
    for T in (1, 16, 64, 256, 1024)
]
OPERATOR += [LayerCase("1B up", 2048, 8192, T, 1024) for T in (1, 64, 256, 1024)]
OPERATOR += [LayerCase(*LLAMA, T, 256) for T in (1, 64, 256)]


@dataclass(frozen=True)
class Problem:
    """A model, a loss that is the mean over B samples, and a batch of them along dimension 0."""

    layer: str
    T: int
    model: nn.Module
    loss_of: Loss
    batch: tuple[Tensor, ...]

    @property
    def B(self) -> int:
        return len(self.batch[0])

    def prepare(self, contestant: Contestant) -> Session:
        """On a copy of the model."""
        return contestant.session(copy.deepcopy(self.model), self.loss_of, self.batch, self.B)


class Given(Function):
    """A loss whose gradient at y is ``scale`` times dy, at no cost. Backward begins here, so the
    incoming gradient is 1.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, dy: Tensor, scale: float) -> Tensor:
        return y.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, dy, ctx.scale = inputs
        ctx.save_for_backward(dy)

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None, None]:
        (dy,) = ctx.saved_tensors
        return dy if ctx.scale == 1 else ctx.scale * dy, None, None


def given_loss(model: Any, batch: tuple[Tensor, ...], B: int) -> Tensor:
    """The mean over the batch's samples; dy is the gradient of a mean over B samples."""
    x, dy = batch
    loss: Tensor = Given.apply(model(x), dy, B / len(x))
    return loss


def layer_problem(layer: str, module: nn.Module, x: Tensor, out: int) -> Problem:
    """Forward and backward of one module, input gradient included, where x is and in its dtype."""
    B, real = len(x), x.is_floating_point()
    of: dict[str, Any] = {"device": x.device, "dtype": x.dtype if real else torch.float32}
    dy = torch.randn(*x.shape[:2], out, **of)
    loss_of = lambda model, batch: given_loss(model, batch, B)
    return Problem(layer, x.shape[1], module.to(**of), loss_of, (x.requires_grad_(real), dy))


def linear(case: LayerCase, most: int | None = None, *, bias: bool = True, **of: Any) -> Problem:
    """At most ``most`` samples of a case; ``of``: device and dtype."""
    torch.manual_seed(0)
    x = torch.randn(min(case.B, most or case.B), case.T, case.I, **of)
    return layer_problem(case.layer, nn.Linear(case.I, case.O, bias), x, case.O)


def _problem(
    layer: str, make: Callable[[], nn.Module], shape: tuple[int, ...], out: int, most: int | None
) -> Problem:
    """At most ``most`` samples of ``shape``; of ids if it has no width."""
    torch.manual_seed(0)
    of_some = min(shape[0], most or shape[0]), *shape[1:]
    ids = len(shape) == 2
    x = torch.randint(0, GPT.vocabulary, of_some) if ids else torch.randn(of_some)
    return layer_problem(layer, make(), x, out)


NORM = "GPT-2 norm 768", partial(nn.LayerNorm, 768), (16, 256, 768), 768
WORDS = "small GPT words 4096x384", partial(nn.Embedding, 4096, 384), (8, 256), 384
TINY = "tiny 32-64-8", Perceptron, (16, 1, 32), 8
"""The README's first model: nothing but what a call costs."""
BLOCK = "GPT-2 block 768", partial(Block, 768, 12), (8, 256, 768), 768
"""Attention with its projections, norms and the layers after it."""
layer_norm, embedding, tiny, attention_block = (
    partial(_problem, *each) for each in (NORM, WORDS, TINY, BLOCK)
)


def small_gpt(kind: type[GPT] = GPT, device: str = "cpu", autocast: bool = False) -> Problem:
    torch.manual_seed(0)
    batch, loss_of = gpt_batch(kind, device), autocast_loss if autocast else gpt_loss
    return Problem("small GPT", kind.T, kind().to(device), loss_of, batch)


IMAGES = [(32, 32), (64, 32), (128, 32), (32, 64), (64, 16), (128, 16), (128, 8), (256, 8)]
"""Channels, and pixels of an image's side."""


def convolutions(channels: int, size: int, autocast: bool = False) -> Problem:
    """Four blocks of a diffusion UNet's kind, on 8 images."""
    torch.manual_seed(0)
    block = lambda: (
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.GroupNorm(8, channels),
        nn.SiLU(),
    )
    model = nn.Sequential(*(layer for _ in range(4) for layer in block()))
    loss_of = partial(cast_loss, squares_loss) if autocast else squares_loss
    batch = (torch.randn(8, channels, size, size),)
    return Problem(f"{channels} channels, {size} x {size}", size**2, model, loss_of, batch)


def squares_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def cast_loss(loss_of: Loss, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return loss_of(model, batch)


autocast_loss = partial(cast_loss, gpt_loss)


def training_step(
    contestant: Contestant, model: nn.Module | None = None, loss_of: Loss = gpt_loss
) -> Callable[[], None]:
    """Forward, loss, backward, AdamW, on a model of its own."""
    torch.manual_seed(0)
    session = contestant.session(model or GPT(), loss_of, gpt_batch(), GPT.B)
    optimizer = torch.optim.AdamW(session.parameters.values(), lr=1e-4)

    def step() -> None:
        session.run()
        optimizer.step()
        session.clear()

    return step


def operands(case: LayerCase, **of: Any) -> tuple[Tensor, Tensor]:
    """``of``: device and dtype."""
    torch.manual_seed(0)
    return torch.randn(case.B, case.T, case.I, **of), torch.randn(case.B, case.T, case.O, **of)


def plain_wgrad(x: Tensor, dy: Tensor) -> Tensor:
    return dy.flatten(0, 1).T @ x.flatten(0, 1)


def weight_gradients(case: LayerCase) -> dict[str, Callable[[], object]]:
    """dW alone, dW with norms by gnsfast's operator, and by each way to write it by hand."""
    x_BTI, dy_BTO = operands(case)
    f32, plain = torch.float32, partial(plain_wgrad, x_BTI, dy_BTO)

    def gram() -> tuple[Tensor, Tensor]:
        norms = (dy_BTO @ dy_BTO.mT).mul_(x_BTI @ x_BTI.mT).sum((1, 2))
        return plain(), norms

    def loop() -> tuple[Tensor, Tensor]:
        dw, norms = torch.zeros(case.O, case.I), []
        for x_TI, dy_TO in zip(x_BTI, dy_BTO):
            g_OI = dy_TO.T @ x_TI
            norms.append(g_OI.square().sum())
            dw += g_OI
        return dw, torch.stack(norms)

    def materialize() -> tuple[Tensor, Tensor]:
        g_BOI = torch.bmm(dy_BTO.mT, x_BTI)
        return g_BOI.sum(0), g_BOI.flatten(1).square().sum(1)

    def with_norms(operator: Callable[[LinearWgrad], Any]) -> tuple[Tensor, Tensor]:
        dw, _, sqnorm_PB, _ = operator(LinearWgrad(x_BTI, dy_BTO, True, False, False, f32))
        return dw, sqnorm_PB[0, : case.B]

    ways: dict[str, Callable[[], object]] = {
        "plain": plain,
        "gnsfast": lambda: with_norms(operators.linear_wgrad),
        "gnsfast in PyTorch": lambda: with_norms(reference.linear_wgrad),
    }
    if case.T > 1:  # a loop over 4096 samples of one token takes a minute
        ways |= {"Gram": gram, "loop": loop}
    if case.B * case.O * case.I <= 1 << 28:  # 1 GiB
        ways["materialize"] = materialize
    return ways


def route(case: LayerCase) -> str:
    """Which route gnsfast takes there."""
    if backends.backend("cpu") == "reference":
        return linear_route(case.T, case.I, case.O)
    if case.T == 1:
        return "closed"
    return "gram" if cpu.takes_gram(cpu.instructions(), case.B, case.T, case.O, case.I) else "fused"

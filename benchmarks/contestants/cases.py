# SPDX-License-Identifier: Apache-2.0
"""What is measured: whole training steps, single layers, and weight gradients alone, named after
the models that they come from.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import gnsfast
from benchmarks.contestants import Contestant, Loss, Session
from benchmarks.networks import GPT, gpt_batch, gpt_loss
from gnsfast import reference
from gnsfast.cli.tiny_gpt import Block
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
        return contestant.prepare(copy.deepcopy(self.model), self.loss_of, self.batch, self.B)


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


def layer_problem(
    layer: str, module: nn.Module, x: Tensor, out: tuple[int, ...], device: str = "cpu"
) -> Problem:
    """Forward and backward of one module, input gradient included."""
    B, x = len(x), x.to(device)
    dy = torch.randn(*x.shape[:2], *out, device=device)
    loss_of = lambda model, batch: given_loss(model, batch, B)
    x.requires_grad_(x.is_floating_point())
    return Problem(layer, x.shape[1], module.to(device), loss_of, (x, dy))


def linear(case: LayerCase, most: int | None = None) -> Problem:
    """At most ``most`` samples of a case."""
    torch.manual_seed(0)
    x = torch.randn(min(case.B, most or case.B), case.T, case.I)
    return layer_problem(case.layer, nn.Linear(case.I, case.O), x, (case.O,))


def layer_norm(most: int | None = None) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(min(16, most or 16), 256, 768)
    return layer_problem("GPT-2 norm 768", nn.LayerNorm(768), x, (768,))


def embedding(most: int | None = None) -> Problem:
    torch.manual_seed(0)
    ids = torch.randint(0, GPT.vocabulary, (min(8, most or 8), 256))
    return layer_problem("small GPT words 4096x384", nn.Embedding(4096, 384), ids, (384,))


def tiny(most: int | None = None) -> Problem:
    """The README's first model: nothing but what a call costs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(min(16, most or 16), 1, 32)
    return layer_problem("tiny 32-64-8", model, x, (8,))


def attention_block(most: int | None = None) -> Problem:
    """A whole block of GPT-2: attention with its projections, norms and the layers after it."""
    torch.manual_seed(0)
    x = torch.randn(min(8, most or 8), 256, 768)
    return layer_problem("GPT-2 block 768", Block(768, 12), x, (768,))


def small_gpt(model: type[GPT] = GPT) -> Problem:
    torch.manual_seed(0)
    batch = gpt_batch(model)
    return Problem("small GPT", model.T, model(), gpt_loss, batch)


def autocast_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return gpt_loss(model, batch)


def compiled_step(contestant: Contestant) -> Callable[[], None]:
    """A training step of a GPT of one layer, width 128, through ``torch.compile``."""
    return training_step(contestant, GPT(128, 2, 1), torch.compile(gpt_loss))


def one_layer_gpt() -> Problem:
    """The model of ``compiled_step``, not compiled."""
    torch.manual_seed(0)
    return Problem("GPT of one layer", GPT.T, GPT(128, 2, 1), gpt_loss, gpt_batch())


def training_step(
    contestant: Contestant, model: nn.Module | None = None, loss_of: Loss = gpt_loss
) -> Callable[[], None]:
    """Forward, loss, backward, AdamW, on a model of its own."""
    torch.manual_seed(0)
    session = contestant.prepare(model or GPT(), loss_of, gpt_batch(), GPT.B)
    optimizer = torch.optim.AdamW(session.parameters.values(), lr=1e-4)

    def step() -> None:
        session.run()
        optimizer.step()
        session.clear()

    return step


def estimated_step() -> tuple[Callable[[], None], Callable[[], float]]:
    """A measured training step, and the seconds that ``GradientNoiseScale`` itself took so far:
    entering and leaving the micro-batch, ``update`` and a ``compute`` every ten steps. The layers'
    own share is not in it.
    """
    torch.manual_seed(0)
    model, batch = GPT(), gpt_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gns = gnsfast.GradientNoiseScale(model)
    spent, steps = 0.0, 0

    def step() -> None:
        nonlocal spent, steps
        microbatch = gns.microbatch(GPT.B)
        start = time.perf_counter()
        microbatch.__enter__()
        spent += time.perf_counter() - start
        gpt_loss(model, batch).backward()
        start = time.perf_counter()
        microbatch.__exit__(None, None, None)
        gns.update()
        steps += 1
        if steps % 10 == 0:
            gns.compute()
        spent += time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: spent


def operands(case: LayerCase) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(case.B, case.T, case.I), torch.randn(case.B, case.T, case.O)


def weight_gradients(case: LayerCase) -> dict[str, Callable[[], object]]:
    """dW alone, dW with norms by gnsfast's operator, and by each way to write it by hand."""
    x_BTI, dy_BTO = operands(case)
    f32 = torch.float32

    def plain() -> Tensor:
        return dy_BTO.flatten(0, 1).T @ x_BTI.flatten(0, 1)

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

# SPDX-License-Identifier: Apache-2.0
"""Modules with code of their own: bare parameters, functions without a kernel, or reasons."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import assert_as_loop, weighted_loss
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Scale(nn.Module):
    """LayerScale: a bare parameter, and a child with a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(5)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.inner(x))


def table() -> nn.Module:
    """ViT's embeddings: a class token and a position table with a leading one."""
    of = lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.places[0]
    return Made(of, token=torch.randn(1, 1, 5), places=torch.randn(1, 10, 5))


def shared_positions() -> nn.Module:
    """A part whose output has no batch dimension: all samples share it."""
    positions = Made(lambda m: m.table.sin(), table=torch.randn(1, 9, 5))
    return Made(lambda m, x: x * m.positions(), positions=positions)


def takes_part() -> nn.Module:
    """Of a part with several outputs, that takes a keyword argument."""

    def outputs(m: Any, x: Tensor, *, shift: float) -> dict[str, Any]:
        return {"y": m.gain * x + shift, "unused": m.gain.sum(), "shift": shift}

    inner = Made(outputs, gain=torch.randn(5))
    return Made(lambda m, x: m.inner(x, shift=0.5)["y"], inner=inner)


class OwnForward(nn.Linear):
    """A subclass that does not call ``nn.Linear.forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.abs(), self.bias)


MODULES = {
    "bare gain": (lambda: nn.Sequential(Scale()), (4, 9, 5), (4, 9, 5)),
    "tables": (table, (4, 9, 5), (4, 10, 5)),
    "shared table": (shared_positions, (4, 9, 5), (4, 9, 5)),
    "subclass with its own forward": (lambda: OwnForward(5, 3), (4, 9, 5), (4, 9, 3)),
    "bilinear-free prelu": (lambda: nn.PReLU(9), (4, 9, 5), (4, 9, 5)),
}


@pytest.mark.parametrize(("make", "shape", "out"), MODULES.values(), ids=MODULES.keys())
def test_exact(make: Any, shape: tuple[int, ...], out: tuple[int, ...]) -> None:
    model, batch = make(), (torch.randn(shape), torch.randn(out))
    loop = loop_sqnorms(model, weighted_loss, batch, 4)
    want = model(batch[0])
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        y = model(batch[0])
        assert torch.equal(y, want)
        (y * batch[1]).sum().backward()
    assert_norms(norms, loop)


def test_dictionary_output_and_keyword_argument() -> None:
    model, batch = takes_part(), (torch.randn(4, 9, 5), torch.randn(4, 9, 5))
    assert_as_loop(model, batch, 4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_its_own(batch_first: bool) -> None:
    """Its projections are used as tensors: all of them come from the replay."""
    own = OwnAttention(8, 2, batch_first=batch_first)
    model = Made(lambda m, x: m.attention(x)[0], attention=own)
    shape = (4, 9, 8) if batch_first else (9, 4, 8)
    batch, dim = (torch.randn(shape), torch.randn(shape)), 0 if batch_first else 1
    loop = loop_sqnorms(model, weighted_loss, batch, 4, batch_dim=dim)
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        weighted_loss(model, batch).backward()
    assert_norms(norms, loop)


def test_a_layer_twice_and_a_weight_as_a_tensor() -> None:
    twice = lambda m, x: m.layer(torch.tanh(m.layer(x))) @ m.other.weight + m.other(x)
    made = Made(twice, layer=nn.Linear(5, 5), other=nn.Linear(5, 5))
    batch = torch.randn(4, 9, 5), torch.randn(4, 9, 5)
    assert_as_loop(nn.Sequential(made, nn.Linear(5, 5)), batch, 4)


def test_autocast() -> None:
    """The audit allows for torch's gradients, which are rounded to half precision."""
    model = nn.Sequential(nn.Conv1d(4, 16, 1), nn.ConvTranspose1d(16, 3, 4, stride=2))
    batch = torch.randn(8, 4, 20), torch.randn(8, 3, 42)
    loop = loop_sqnorms(model, weighted_loss, batch, 8)
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    for block in (gns.microbatch(8), gnsfast.per_sample_sqnorms(model, 8)):
        with block as norms:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(batch[0])
            (y * batch[1]).sum().backward()
    assert_norms(norms, loop, rtol=2e-2)
    gns.update()
    assert gns.compute().updates == 1


class Random(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def test_a_gain_before_dropout() -> None:
    """Its gradient is that of the numbers drawn, for each sample."""
    model, x = nn.Sequential(Random()), torch.randn(4, 9, 5)
    torch.manual_seed(1)
    y = model(x)
    want = [
        torch.autograd.grad(y[b].sum(), [*model.parameters()], retain_graph=True) for b in range(4)
    ]
    torch.manual_seed(1)
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        model(x).sum().backward()
    for k, (name, _) in enumerate(model.named_parameters()):
        truth = torch.stack([g[k].square().sum() for g in want])
        torch.testing.assert_close(norms[name], truth)


class Mixing(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


calls = [0]


class Counting(Scale):
    """State that no module holds: every call gives another result."""

    def forward(self, x: Tensor) -> Tensor:
        calls[0] += 1
        return calls[0] * super().forward(x)


@pytest.mark.parametrize("make", [Mixing, Counting])
def test_samples_that_are_not_apart_are_named(make: type[nn.Module]) -> None:
    model = nn.Sequential(make())
    with pytest.raises(gnsfast.ObservationError, match=r"0\.gain: .*sample"):
        with gnsfast.per_sample_sqnorms(model, 4):
            model(torch.randn(4, 9, 5)).sum().backward()


def test_a_model_that_takes_pairs() -> None:
    """It does not take three samples, nor one: nothing is proven."""

    class Pairs(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unflatten(0, (2, -1)).flatten(0, 1))

    model, batch = nn.Sequential(Pairs()), (torch.randn(4, 9, 5), torch.randn(4, 9, 5))
    plain = nn.Sequential(Scale())
    plain.load_state_dict(model.state_dict())
    assert_as_loop(model, batch, 4, twin=plain)
    assert "does not take" in gnsfast.coverage(model).proof


def test_square_argument_is_not_taken_for_samples() -> None:
    """A [T, T] mask with T = B that is the module's own."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(5))
            self.register_buffer("mask", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.mask @ (self.gain * x)

    model, batch = Masked(), (torch.randn(4, 4, 5), torch.randn(4, 4, 5))
    assert_as_loop(model, batch, 4)


class OwnAttention(nn.MultiheadAttention):
    """A forward of its own, which the kernels do not know."""

    def forward(self, x: Tensor) -> Any:
        return nn.MultiheadAttention.forward(self, x, x, x)


def hooked(width: int) -> nn.Module:
    """A layer whose weight somebody's hook computes."""
    layer = nn.Linear(width, width)
    layer.weight_g = nn.Parameter(torch.rand(width, 1))
    layer.weight_v = nn.Parameter(torch.randn(width, width))
    del layer.weight
    layer.register_forward_pre_hook(lambda m, x: setattr(m, "weight", m.weight_g * m.weight_v))
    return layer


def test_a_hook_computes_a_weight() -> None:
    model = nn.Sequential(nn.Linear(5, 6), hooked(6), nn.Linear(6, 3))
    batch = torch.randn(4, 5), torch.randn(4, 3)
    norms_of_copies = []
    for b in range(4):
        y = (model(batch[0][b : b + 1]) * batch[1][b : b + 1]).sum()
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(y, [*named.values()])
        norms_of_copies.append({n: g.square().sum() for n, g in zip(named, grads)})
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        weighted_loss(model, batch).backward()
    for name in norms_of_copies[0]:
        torch.testing.assert_close(norms[name], torch.stack([o[name] for o in norms_of_copies]))

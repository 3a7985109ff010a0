# SPDX-License-Identifier: Apache-2.0
"""The head's own cross entropy: against torch's, and per sample against the float64 loop."""

import copy
from typing import Any

import pytest
import torch
from cross_entropy import B, Batch, D, T, V, draw, small_parts, torch_loss
from layers import assert_as_loop, error_against_loop, plain
from oracle import assert_norms, loop_sqnorms, sample_of
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import _cross_entropy

__all__ = ["small_parts"]


class InForward(nn.Module):
    """A model whose forward calls the head; the first batch shows its samples."""

    def __init__(self, head: gnsfast.Linear, **options: Any) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head.cross_entropy(x, labels, **self.options)


def assert_head(
    head: gnsfast.Linear,
    batch: Batch,
    samples: int,
    rtol: float = 1e-5,
    dim: int = 0,
    **options: Any,
) -> None:
    """Open and closed: torch's loss and gradients; open: the loop's norms for every sample."""
    twin, model = plain(head), InForward(head, **options)
    x, labels = batch
    r = torch.rand(labels.shape, dtype=x.dtype) if options.get("reduction") == "none" else 1.0
    leaves = [x.detach().requires_grad_() for _ in range(3)]
    want = torch_loss(twin, (leaves[0], labels), batch_dim=dim, **options)
    (want * r).sum().backward()
    shut = copy.deepcopy(head)
    closed = shut.cross_entropy(leaves[1], labels, **options)
    (closed * r).sum().backward()
    opened = model if dim else head
    with gnsfast.per_sample_sqnorms(opened, samples) as norms:
        loss = model(leaves[2], labels) if dim else head.cross_entropy(leaves[2], labels, **options)
        (loss * r).sum().backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(closed, want)
    for ours in (head, shut):
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                scale = 1e-5 * q.grad.abs().max().item() if q.numel() else 0.0
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=scale)
    for leaf in leaves[1:]:
        torch.testing.assert_close(leaf.grad, leaves[0].grad, rtol=1e-5, atol=1e-6)

    def summed(m: nn.Module, b: Any) -> Tensor:
        own = {**options, "reduction": "none" if isinstance(r, Tensor) else "sum"}
        return (torch_loss(m, b[:2], batch_dim=dim, **own) * b[2]).sum()

    loop = loop_sqnorms(twin, summed, (x, labels, r), samples, batch_dim=dim)
    if options.get("reduction", "mean") == "mean":
        n = (labels != options.get("ignore_index", -100)).sum()
        if options.get("shift"):
            kept = labels[1:] if dim else labels[..., 1:]
            n = (kept != options.get("ignore_index", -100)).sum()
        loop = {name: norm / n**2 for name, norm in loop.items()}
    assert_norms({name.removeprefix("head."): n for name, n in norms.items()}, loop, rtol)


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "another ignored label": dict(ignore_index=7),
    "smoothed": dict(label_smoothing=0.1),
    "capped": dict(softcap=1.5),
    "z-loss": dict(z_loss=0.3),
    "shifted": dict(shift=True),
    "all": dict(softcap=2.0, z_loss=0.1, label_smoothing=0.2, shift=True, reduction="none"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_options(options: dict[str, Any], bias: bool) -> None:
    x, labels = draw(B, T)
    if "ignore_index" in options:
        labels = labels.masked_fill(labels < 0, options["ignore_index"])
    assert_head(gnsfast.Linear(D, V, bias=bias), (x, labels), B, **options)


SHAPES = [(1, T), (B, 1), (B,), (2, 3, 4), (0, T), (B, 0), (2, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_head(gnsfast.Linear(D, V), draw(*shape), shape[0], reduction="sum")


def test_a_part_is_wider_where_tokens_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cross_entropy, "CHUNK", 18 * 300)
    widths = [p.stop - p.start for p in _cross_entropy._parts(V, torch.empty(18, D))]
    assert widths == [256, 44]
    assert_head(gnsfast.Linear(D, V), draw(B, T), B)


STRIDES = {
    "a slice": lambda: (torch.randn(B, T + 2, D)[:, 1:-1], torch.randint(0, V, (B, 2 * T))[:, ::2]),
    "expanded": lambda: (torch.randn(1, T, D).expand(B, -1, -1), draw(1, T)[1].expand(B, -1)),
    "transposed": lambda: tuple(t.transpose(0, 1) for t in draw(T, B)),
    "int32 labels": lambda: (torch.randn(B, T, D), draw(B, T)[1].int()),
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES.keys())
def test_strides(make: Any) -> None:
    x, labels = make()
    head = gnsfast.Linear(D, V)
    want = torch_loss(plain(head), (x, labels.long()), reduction="sum")
    torch.testing.assert_close(head.cross_entropy(x, labels, reduction="sum"), want)
    assert_head(head, (x, labels.long()), B, reduction="sum")


def test_sequence_first() -> None:
    assert_head(gnsfast.Linear(D, V), draw(T, B), B, dim=1, reduction="none")


def test_a_shift_from_sample_to_sample() -> None:
    """With the samples in the last dimension of the labels a shift ties them together."""
    model, batch = InForward(gnsfast.Linear(D, V), shift=True), draw(T, B)
    want = model(*batch)
    with pytest.raises(gnsfast.ObservationError, match="head.weight"):
        with gnsfast.per_sample_sqnorms(model, B):
            loss = model(*batch)
            loss.backward()
    torch.testing.assert_close(loss, want)


def test_folded_rows() -> None:
    """Eighteen rows are three samples of six."""

    class Folded(InForward):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x.flatten(0, 1), labels.flatten())

    model, (x, labels) = Folded(gnsfast.Linear(D, V), reduction="sum"), draw(B, T)
    table = gnsfast.learn(Folded(model.head, reduction="none"), (x, labels))
    loop = loop_sqnorms(model, lambda m, b: m(*b), (x, labels), B)
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        model(x, labels).backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen(frozen: str) -> None:
    head = gnsfast.Linear(D, V)
    getattr(head, frozen).requires_grad_(False)
    assert_head(head, draw(B, T), B)


def test_frozen_head_below_a_trained_layer() -> None:
    model = nn.Sequential(nn.Linear(D, D), gnsfast.Linear(D, V))
    model[1].requires_grad_(False)
    x, labels = draw(B, T)
    loop = loop_sqnorms(model, lambda m, b: torch_loss(m, b, reduction="sum"), (x, labels), B)
    with gnsfast.per_sample_sqnorms(model, B, table=gnsfast.learn(model, x)) as norms:
        model[1].cross_entropy(model[0](x), labels, reduction="sum").backward()
    assert_norms(norms, loop)
    probe = torch.zeros(0, B + 2, requires_grad=True)
    h = model[0](x)
    gnsfast.functional.linear_cross_entropy(h, model[1].weight, labels, probe=probe).backward()


def test_input_without_gradient_and_no_grad() -> None:
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    with gnsfast.per_sample_sqnorms(head, B) as norms:
        with torch.no_grad():
            assert not head.cross_entropy(x, labels).requires_grad
        head.cross_entropy(x, labels).backward()
    assert norms["weight"].isfinite().all()


def test_float64() -> None:
    x, labels = draw(B, T)
    assert_head(gnsfast.Linear(D, V).double(), (x.double(), labels), B, rtol=1e-6)


def cast(head: nn.Module, batch: Any, **options: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch_loss(head, batch, **options)


@pytest.mark.parametrize("T", [1, 4, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
def test_half_precision(dtype: torch.dtype | None, T: int) -> None:
    """None is autocast. No further from float64 than twice plain torch: norms per sample, and the
    gradients of weight, bias and input.
    """
    head, x, labels = gnsfast.Linear(48, V), torch.randn(4, T, 48), torch.randint(0, V, (4, T))
    if dtype is not None:
        head, x = head.to(dtype), x.to(dtype)
    torch_s, twin, batch = cast if dtype is None else torch_loss, plain(head), (x, labels)

    def summed(m: nn.Module, b: Batch) -> Tensor:
        return torch_loss(m, b, reduction="sum")

    loop = loop_sqnorms(twin, summed, batch, 4)
    torch_error = 0.0
    for b in range(4):
        value = torch_s(twin, sample_of(batch, b), reduction="sum")
        for (n, _), g in zip(
            head.named_parameters(), torch.autograd.grad(value, twin.parameters())
        ):
            error = (g.double().square().sum() - loop[n][b]).abs() / loop[n][b]
            torch_error = max(torch_error, error.item())
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with gnsfast.per_sample_sqnorms(head, 4) as norms:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            loss = head.cross_entropy(leaves[0], labels, reduction="sum")
        loss.backward()
    assert loss.dtype == torch.float32
    assert error_against_loop(norms, loop) <= 2 * torch_error
    torch_s(twin, (leaves[1], labels), reduction="sum").backward()
    wide, x64 = copy.deepcopy(twin).double(), x.double().requires_grad_()
    wide.zero_grad()
    torch_loss(wide, (x64, labels), reduction="sum").backward()
    triples = zip(
        [*head.parameters(), leaves[0]], [*twin.parameters(), leaves[1]], [*wide.parameters(), x64]
    )
    for ours, theirs, exact in triples:
        assert ours.grad.dtype == theirs.grad.dtype
        ours_error, torch_error = ((t.grad.double() - exact.grad).norm() for t in (ours, theirs))
        assert ours_error <= 2 * torch_error


def test_all_ignored_is_torch_s_nan() -> None:
    head, x = gnsfast.Linear(D, V), torch.randn(B, T, D)
    labels = torch.full((B, T), -100)
    with gnsfast.per_sample_sqnorms(head, B) as norms:
        loss = head.cross_entropy(x, labels)
        loss.backward()
    twin = plain(head)
    torch_loss(twin, (x, labels)).backward()
    assert loss.isnan() and not norms.total().any()
    assert torch.equal(head.weight.grad, twin.weight.grad)


def test_words_of_probability_zero() -> None:
    """A bias of -inf, as padded vocabularies have, here over more than a whole part."""
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    with torch.no_grad():
        head.bias[:140] = -torch.inf
    labels = labels.masked_fill((labels >= 0) & (labels < 140), 200)
    with gnsfast.per_sample_sqnorms(head, B) as norms:
        head.cross_entropy(x, labels, reduction="sum").backward()
    loop = loop_sqnorms(plain(head), lambda m, b: torch_loss(m, b, reduction="sum"), (x, labels), B)
    assert_norms(norms, loop)


def test_large_logits() -> None:
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    assert_head(head, (100 * x, labels), B)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "flat labels": (lambda y: y.flatten(), {}, r"\[18\] do not fit an input of shape \[3, 6, 5\]"),
    "real labels": (lambda y: y.float(), {}, "must be integers, .* not torch.float32"),
    "a label too large": (lambda y: y.abs() + V, {}, "must be 0 to 299, or ignore_index"),
    "a negative label": (lambda y: y.clamp_max(-1), dict(ignore_index=0), "do not fit a weight"),
    "reduction": (lambda y: y, dict(reduction="max"), "'none', not 'max'"),
    "smoothing": (lambda y: y, dict(label_smoothing=2.0), "between 0 and 1, not 2.0"),
    "softcap": (lambda y: y, dict(softcap=0.0), "positive number or None"),
}


@pytest.mark.parametrize(("change", "options", "match"), WRONG.values(), ids=WRONG.keys())
def test_bad_input(change: Any, options: dict[str, Any], match: str) -> None:
    x, labels = draw(B, T)
    with pytest.raises(ValueError, match=match):
        gnsfast.Linear(D, V).cross_entropy(x, change(labels), **options)


def test_bad_dtype_probe_and_shift() -> None:
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    with pytest.raises(ValueError, match="x is torch.bfloat16 and weight torch.float32"):
        head.cross_entropy(x.bfloat16(), labels)
    with pytest.raises(ValueError, match=r"shift needs the tokens .* shape \[3\]"):
        head.cross_entropy(x[:, 0], labels[:, 0], shift=True)
    with pytest.raises(ValueError, match=r"float32 \[1, B \+ 2\]"):
        probe = torch.zeros(2, B + 2, requires_grad=True)
        gnsfast.functional.linear_cross_entropy(x, head.weight, labels, probe=probe)
    with pytest.raises(gnsfast.ObservationError, match="weight: no batch .* linear_cross_entropy"):
        with gnsfast.per_sample_sqnorms(head, 4):
            head.cross_entropy(x, labels)


def test_heads_that_it_cannot_stand_for() -> None:
    class Scaled(gnsfast.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    scaled, (x, labels) = Scaled(D, V), draw(B, T)
    with pytest.raises(NotImplementedError, match="Scaled has a forward of its own"):
        scaled.cross_entropy(x, labels)

    class Sharded(nn.Parameter):
        placements = ()

    sharded = gnsfast.Linear(D, V)
    sharded.weight = Sharded(sharded.weight.detach())
    with pytest.raises(NotImplementedError, match="register_fsdp_forward_method"):
        sharded.cross_entropy(x, labels)


@pytest.mark.parametrize("other", ["loss", "output"])
def test_calls_are_joined(other: str) -> None:
    head, batch = gnsfast.Linear(D, V), draw(B, T)

    def twice(m: Any, b: Batch) -> Tensor:
        first: Tensor = m.cross_entropy(b[0], b[1], reduction="sum")
        if other == "loss":
            return first + 2 * m.cross_entropy(b[0].sin(), b[1], reduction="sum")
        return first + m(b[0]).square().sum()

    assert_as_loop(head, batch, B, loss=twice)


def test_summed_norm_and_counter() -> None:
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    probe = torch.zeros(2, B + 2, requires_grad=True)
    gnsfast.functional.linear_cross_entropy(
        x, head.weight, labels, bias=head.bias, probe=probe
    ).backward()
    for row, p in zip(probe.grad, head.parameters()):
        torch.testing.assert_close(row[B], p.grad.square().sum())
        assert row[B + 1] == 1.0

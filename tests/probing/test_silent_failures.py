# SPDX-License-Identifier: Apache-2.0
"""Everything that makes per-sample norms wrong in silence elsewhere is caught here, with the
module's name.
"""

from collections.abc import Callable

import pytest
import torch
import unseen
from made import Made
from oracle import assert_norms, loop_sqnorms
from repeated_models import Again, square
from torch import Tensor, nn

import gnsfast
from gnsfast.reasons import UNREACHED
from gnsfast.signatures import LinearWgrad

ObservationError, SampleShapeError = gnsfast.ObservationError, gnsfast.SampleShapeError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def run(model: nn.Module, x: Tensor, num_samples: int = 4) -> None:
    with gnsfast.per_sample_sqnorms(model, num_samples):
        model(x).square().sum().backward()


def right(model: nn.Module, x: Tensor) -> None:
    """Norms are those of single samples, also in a later pass."""
    for _ in range(2):
        loop = loop_sqnorms(model, square, x, len(x))
        with gnsfast.per_sample_sqnorms(model, len(x), audit="always") as norms:
            square(model, x).backward()
        assert_norms(norms, loop)
        model.zero_grad()
        x = x.flip(0)


def test_weight_that_a_kernel_takes_too() -> None:
    """In the first batch it is left out by name. Later it is an error: the counter reads one, but
    the sums do not agree with ``.grad``.
    """

    class Fused(Model):
        fuses = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return unseen.linear(y, self.first.weight) if self.fuses else y

    model, x = Fused(), torch.randn(4, 5)
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        model(x).square().sum().backward()
    assert norms.keys() == {"last.weight", "last.bias", "first.bias"}
    row = gnsfast.coverage(model).rows[0]
    assert not row.static and "its norm for a sample" in row.reason
    model = Fused()
    model.fuses = False
    run(model, x)
    model.fuses = True
    with pytest.raises(ObservationError, match=r"first\.weight: .*the part that was measured"):
        with gnsfast.per_sample_sqnorms(model, 4, audit="always"):
            model(x).square().sum().backward()


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize(("several", "share"), [(False, 1.0), (False, 1e-2), (True, 10.0)])
def test_penalty_on_a_weight(several: bool, share: float, of_torch: bool) -> None:
    """The sums differ from ``.grad`` by 1 % for the small one."""
    model, x = Again(nn.Linear(5, 5)) if several else Model(), torch.randn(4, 5)
    why = "belongs to no sample" if of_torch else "the part that was measured"
    with pytest.raises(ObservationError, match=rf"(first|layer)\.weight: .*{why}"):
        with gnsfast.per_sample_sqnorms(model, 4):
            w = model.layer.weight if several else model.first.weight
            penalty = share * w.sum() if of_torch else unseen.penalty(w, share)
            (model(x).square().sum() + penalty).backward()


def test_gradients_that_start_at_zero_are_checked_too() -> None:
    """``zero_grad(set_to_none=False)`` leaves tensors of zeros."""
    model = Model()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(ObservationError, match=r"first\.weight: .*the part that was measured"):
        with gnsfast.per_sample_sqnorms(model, 4):
            y = model(torch.randn(4, 5))
            unseen.linear(y, model.first.weight).square().sum().backward()


def test_overflow_is_no_failure() -> None:
    """A loss scaled beyond float32, as a gradient scaler tries: norms that are not finite."""
    model = Model()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        (model(torch.randn(4, 5)).square().sum() * 1e38).backward()
    assert not norms.total().isfinite().all()


def test_clipping_hooks_are_no_failure() -> None:
    model = Model()
    model.first.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    run(model, torch.randn(4, 5))


def test_unused_module_is_no_failure() -> None:
    class Unused(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    model = Unused()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        model(torch.randn(4, 5)).sum().backward()
    assert {*norms} == {"first.weight", "first.bias"}
    rows = gnsfast.coverage(model).rows
    assert [r.observed for r in rows] == [True, True, None, None]
    assert all(r.reason == UNREACHED.text() for r in rows[2:])


def test_unused_module_with_an_older_gradient() -> None:
    """Accumulation: what an earlier pass left in ``.grad`` does not count as this pass's."""
    model = Model()
    run(model, torch.randn(4, 5))
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        model.first(torch.randn(4, 5)).sum().backward()
    assert norms["last.weight"].tolist() == [0.0] * 4


def backward_twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_micro_batches(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        model(x).sum().backward()


def gradients_that_are_returned(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(model(x).sum(), list(model.parameters()))


def of_given_inputs(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward(inputs=list(model.parameters()))


PASSES: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "backward twice": (backward_twice, "do not add up"),
    "two micro-batches": (two_micro_batches, "do not add up"),
    "no backward": (lambda model, x: model(x).sum(), "No backward pass"),
    "returned": (gradients_that_are_returned, "No backward pass"),
    "a graph": (lambda model, x: model(x).sum().backward(create_graph=True), "create_graph=True"),
    "given inputs": (of_given_inputs, r"backward\(inputs=...\)"),
}
"""What is no pass of one forward and one backward after the other."""


@pytest.mark.parametrize("several", [False, True], ids=["one use", "several uses"])
@pytest.mark.parametrize("name", PASSES)
def test_a_block_holds_one_pass(name: str, several: bool) -> None:
    """The next one is right."""
    model, x = Again(nn.Linear(5, 5)) if several else Model(), torch.randn(4, 5)
    passes, match = PASSES[name]
    with pytest.raises(ObservationError, match=match):
        with gnsfast.per_sample_sqnorms(model, 4):
            passes(model, x)
    model.zero_grad()
    right(model, x)


@pytest.mark.parametrize("why", ["excluded", "no sample of the batch"])
@pytest.mark.parametrize("measure", ["norms", "noise scale"])
def test_backward_reaches_only_what_is_left_out(measure: str, why: str) -> None:
    """The message does not say that there was no backward pass."""
    parts = {"a": nn.Linear(5, 5), "w": torch.randn(5)}
    model = Made(lambda s, x, i=0: s.a(x) if i else x.mean(0) * s.w.exp(), **parts)
    gnsfast.configure(model, exclude=["w"] if why == "excluded" else [])
    gns = gnsfast.GradientNoiseScale(model, gnsfast.learn(model, (torch.randn(4, 5), 1)))
    block = gnsfast.per_sample_sqnorms(model, 4) if measure == "norms" else gns.update(4)
    with pytest.raises(ObservationError, match=f"has norms. Of those without norms, w: .*{why}"):
        with block:
            model(torch.randn(4, 5)).sum().backward()


def test_forward_before_the_block() -> None:
    model = Model()
    loss = model(torch.randn(4, 5)).sum()
    with pytest.raises(ObservationError, match="forward pass ran before the block"):
        with gnsfast.per_sample_sqnorms(model, 4):
            loss.backward()


@pytest.mark.parametrize("num_samples", [2, 3, 8])
def test_wrong_num_samples(num_samples: int) -> None:
    with pytest.raises(SampleShapeError, match=rf"Model: the block has {num_samples} samples"):
        run(Model(), torch.randn(4, 5), num_samples)


@pytest.mark.parametrize("num_samples", [-1, 2.0, True, None])
def test_num_samples_that_is_no_count(num_samples: object) -> None:
    with pytest.raises(ValueError, match="num_samples must be a whole number"):
        gnsfast.per_sample_sqnorms(Model(), num_samples)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(10, 5), (12, 5), (9, 5, 5)], ids=str)
def test_a_batch_of_other_samples(shape: tuple[int, ...]) -> None:
    with pytest.raises(SampleShapeError, match="none of which has dimension 0 or 1 of size 4"):
        run(Model(), torch.randn(*shape))


def test_open_twice() -> None:
    model = Model()
    with pytest.raises(ObservationError, match="A block is open on this model already"):
        with gnsfast.per_sample_sqnorms(model, 4), gnsfast.per_sample_sqnorms(model, 4):
            pass
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_norms_before_the_end() -> None:
    model = Model()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        model(torch.randn(4, 5)).sum().backward()
        with pytest.raises(ObservationError, match="Read them after it"):
            norms.total()
    assert norms.total().shape == (4,)


def test_cuda_without_a_kernel_is_named() -> None:
    """The dispatcher finds the refusal, not the CPU's code."""
    x = torch.empty(2, 3, 5, device="meta")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("gnsfast::linear_wgrad", "CUDA")
    a = LinearWgrad(x, x, True, True, False, torch.float32)
    dw, _, sqnorm_PB, _ = gnsfast.ops.linear_wgrad(a)
    assert dw.shape == (5, 5) and sqnorm_PB.shape == (2, 4)


def test_weight_used_as_a_tensor_in_later_passes() -> None:
    """``audit="always"`` finds what the first pass did not have, beside older gradients too."""
    model, x = Model(), torch.randn(4, 5)
    run(model, x)
    with pytest.raises(ObservationError, match=r"first\.weight: .*the part that was measured"):
        with gnsfast.per_sample_sqnorms(model, 4, audit="always"):
            (model(x).square().sum() + unseen.penalty(model.first.weight)).backward()
    with pytest.raises(ValueError, match="audit must be"):
        gnsfast.per_sample_sqnorms(model, 4, audit="never")


@pytest.mark.parametrize("before", ["gradients", "a hook", "verify"])
def test_audit_is_on_in_ordinary_situations(before: str) -> None:
    model, x = Model(), torch.randn(4, 5)
    if before == "gradients":
        model(x).sum().backward()
    elif before == "a hook":
        model.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    else:
        loss = lambda m, x: m(x).square().sum()
        assert gnsfast.verify(model, loss, x, loss_reduction="sum").ok
    with pytest.raises(ObservationError, match=r"first\.weight: .*the part that was measured"):
        with gnsfast.per_sample_sqnorms(model, 4):
            unseen.linear(model(x), model.first.weight).square().sum().backward()


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(6, 5), nn.Linear(5, 5)


def test_only_the_first_row_of_a_shared_lookup() -> None:
    """``table(index[None])[0]`` belongs to all samples."""

    class First(Tables):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) + self.table(torch.arange(6)[None])[0].sum(0)

    right(First(), torch.randn(4, 5))


def test_one_sample_where_four_were_promised() -> None:
    class Tokens(Tables):
        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.table(ids))

    with pytest.raises(SampleShapeError, match="the block has 4 samples"):
        run(Tokens(), torch.tensor([[3, 1, 4, 1, 5]]))


def test_untied_later() -> None:
    class Tied(Tables):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 6, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.last(self.table(ids)))

    model, ids = Tied(), torch.randint(0, 6, (4, 3))
    right(model, ids)
    model.head.weight = nn.Parameter(torch.randn(6, 5))
    right(model, ids)


def test_block_entered_again() -> None:
    """Each entry has a result of its own."""
    model = Model()
    block = gnsfast.per_sample_sqnorms(model, 4)
    with block as first:
        model(torch.randn(4, 5)).sum().backward()
    before = first.total()
    with block as second:
        with pytest.raises(ObservationError, match="complete when"):
            second.total()
        model(torch.randn(4, 5)).sum().backward()
    assert torch.equal(first.total(), before) and not torch.equal(second.total(), before)

# SPDX-License-Identifier: Apache-2.0
"""What an update does not do where nothing would come of it, and that its checks stay."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import unseen
from torch import Tensor, nn

import gnsfast
from gnsfast.estimator.fingerprint import Fingerprint

N, D = 6, 4


class Fused(nn.Module):
    """It takes the weight of ``b`` as a tensor if asked to, with or without a call of ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, call: bool = True, tensor: bool = False) -> Tensor:
        x = self.a(x)
        y = self.b(x) if call else 0.0 * x
        return y + unseen.linear(x, self.b.weight) if tensor else y


def made(**settings: Any) -> tuple[nn.Module, gnsfast.GradientNoiseScale]:
    model = Fused()
    table = gnsfast.learn(model, torch.randn(N, D))
    return model, gnsfast.GradientNoiseScale(model, table, **settings)


def block(model: nn.Module, gns: gnsfast.GradientNoiseScale, **how: bool) -> None:
    with gns.microbatch(N):
        model(torch.randn(N, D), **how).square().mean().backward()


@pytest.mark.parametrize("since", [2, 30, 60])
def test_a_use_as_a_tensor_that_begins_late_is_found(since: int) -> None:
    model, gns = made()
    for step in range(1, 65):
        block(model, gns, tensor=step >= since)
        gns.update()
        model.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match=r"b\.weight: .*the part that was measured"):
        gns.compute()


def hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_marks_take_the_place_of_hooks() -> None:
    """On one process, where there is no gradient before: others can be written to without one."""
    model, gns = made()
    for held in (0, 3):
        with gns.microbatch(N):
            assert hooks(model) == held
            model(torch.randn(N, D)).square().mean().backward()
    gns.update()
    assert hooks(model) == 0
    gns.compute()


def test_hooks_stay_where_processes_may_share_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gns = made()
    block(model, gns)
    gns.update()
    model.zero_grad()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with gns.microbatch(N):
        assert hooks(model) == 3
        model(torch.randn(N, D)).square().mean().backward()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("source", ["auto", "local"])
def test_a_gradient_without_a_call_is_noticed(source: str, held: bool) -> None:
    """Whether or not ``.grad`` was there before."""
    model, gns = made(source=source)
    block(model, gns)
    gns.update()
    model.zero_grad(set_to_none=not held)
    block(model, gns, call=False, tensor=True)
    gns.update()
    with pytest.raises(gnsfast.ObservationError, match=r"b\.weight got a gradient"):
        gns.compute()


@pytest.mark.parametrize("detached", [False, True])
def test_a_bucket_whose_other_part_is_written_to_got_no_gradient(detached: bool) -> None:
    """``b`` is not used at all, and a write to ``a``'s gradients changes its version too."""
    model, gns = made()
    flat, first = torch.zeros(D * D + D * D), D * D
    parts = [t.view(D, D) for t in (flat[:first], flat[first:])]
    model.a.weight.grad, model.b.weight.grad = (t.detach() if detached else t for t in parts)
    with gns.microbatch(N):
        model.a(torch.randn(N, D)).square().mean().backward()
    gns.update()
    gns.compute()


@pytest.mark.parametrize("held", [False, True])
def test_zeros_are_no_gradient(held: bool) -> None:
    """Neither those that ``zero_grad`` writes before the backward pass, nor those after it."""
    model, gns = made()
    if held:
        model.b.weight.grad = torch.zeros(D, D)
    with gns.microbatch(N):
        model.zero_grad(set_to_none=False)
        model.a(torch.randn(N, D)).square().mean().backward()
        if held:
            model.b.weight.grad.zero_()
    gns.update()
    gns.compute()


@pytest.mark.parametrize("held", [False, True])
def test_a_second_backward_pass_through_a_weight_is_noticed(held: bool) -> None:
    """Of a module that is not called; its probe does not see it."""
    model, gns = made(source="local")
    if held:
        model.b.weight.grad = torch.zeros(D, D)
    with gns.microbatch(N):
        model.a(torch.randn(N, D)).square().mean().backward()
        unseen.linear(torch.randn(N, D), model.b.weight).square().mean().backward()
    gns.update()
    with pytest.raises(gnsfast.ObservationError, match=r"b\.weight got a gradient"):
        gns.compute()


@pytest.mark.parametrize("late", [False, True])
def test_gradients_that_begin_anew_in_a_block_are_noticed(late: bool) -> None:
    """By ``zero_grad`` in the second block, or in the third, before its backward pass."""
    model, gns = made()
    for _ in range(1 + late):
        block(model, gns)
    with pytest.raises(gnsfast.ObservationError, match="between two micro-batches"):
        with gns.microbatch(N):
            loss = model(torch.randn(N, D)).square().mean()
            model.zero_grad()
            loss.backward()
    model.zero_grad()
    for _ in range(3):
        block(model, gns)
    gns.update()
    gns.compute()


@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("shape", ["two layers", "one weight", "one buffer"])
def test_gradients_zeroed_in_place_in_a_later_block_are_noticed(
    shape: str, forward_first: bool
) -> None:
    """Autograd then adds to the same tensors, which lack the passes before."""
    model = nn.Sequential(nn.Linear(D, D, bias=False))
    if shape != "one weight":
        model.append(nn.Linear(D, 1))
    gns = gnsfast.GradientNoiseScale(model)
    if shape == "one buffer":
        sizes = [p.numel() for p in model.parameters()]
        for p, part in zip(model.parameters(), torch.zeros(sum(sizes)).split(sizes)):
            p.grad = part.view_as(p)

    def run(zeroed: bool) -> None:
        with gns.microbatch(N):
            loss = model(torch.randn(N, D)).square().mean() if forward_first else None
            if zeroed:
                model.zero_grad(set_to_none=False)
            (model(torch.randn(N, D)).square().mean() if loss is None else loss).backward()

    for _ in range(3):
        run(zeroed=False)
    gns.update()
    assert gns.compute().updates == 1
    model.zero_grad(set_to_none=False)
    run(zeroed=False)
    with pytest.raises(gnsfast.ObservationError, match="zero_grad after gns.update.. only"):
        run(zeroed=True)


def test_a_hook_that_writes_to_what_has_arrived_is_no_zeroing() -> None:
    def rewrite(p: Any) -> None:
        p.grad.mul_(1).add_(0)

    model, gns = made()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(rewrite)
    for _ in range(3):
        block(model, gns)
    gns.update()
    assert gns.compute().updates == 1


def witnesses(monkeypatch: pytest.MonkeyPatch, microbatches: int, **settings: Any) -> int:
    """How often an update reads norms of gradients."""
    read = []
    norms = Fingerprint.norms
    model, gns = made(**settings)
    block(model, gns)
    gns.update()
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(Fingerprint, "norms", lambda of: read.append(found := norms(of)) or found)
        for _ in range(microbatches):
            block(model, gns)
        gns.update()
    return sum(found is not None for found in read)


def test_an_update_of_one_pass_reads_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert witnesses(monkeypatch, 1) == 0
    assert witnesses(monkeypatch, 3) == 3  # after the second and the third pass, and at the end
    assert witnesses(monkeypatch, 1, source="global") == 2
    assert witnesses(monkeypatch, 2, source="local") == 0


@pytest.mark.parametrize("settings", [dict(source="global"), dict()])
def test_gradients_that_are_scaled_without_a_mark_are_noticed(settings: Any) -> None:
    """As ``unscale_`` does on a CPU."""
    model, gns = made(**settings)
    for _ in range(2):
        block(model, gns)
    for p in model.parameters():
        p.grad.data.mul_(0.5)  # ``.data`` has a version of its own
    gns.update()
    with pytest.raises(gnsfast.ObservationError, match="radients were changed"):
        gns.compute()


def test_one_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is spared the sum over processes, which would leave its numbers as they are."""
    model, gns = made()
    block(model, gns)
    gns.update()
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: None)
    parts = [torch.randn(2, width, dtype=torch.float64) for width in (7, 8, 0, 6, 5, 3)]
    parts[-1][:, 1] = parts[-1][:, 0].square()  # of a norm that is given
    summed, apart = gns._start().ledger._numbers._summed(parts, torch.rand(2).double())
    assert all(map(torch.equal, summed, parts)) and not apart.any()
    parts[-1][0, 1] += 1.0
    assert gns._start().ledger._numbers._summed(parts, torch.rand(2).double())[1].any()

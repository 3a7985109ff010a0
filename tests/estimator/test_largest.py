# SPDX-License-Identifier: Apache-2.0
"""The samples with the largest gradients, against a loop over single samples."""

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from noise_cases import one_update
from oracle import loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, D, KEPT = 6, 8, 4


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), x[:, :3].argmax(1))


def norms_of(model: nn.Module, x: Tensor, share: float) -> dict[str, Tensor]:
    """The squared norms [B] of each sample's share of the gradient, by parameter."""
    loop = loop_sqnorms(model, mean_loss, x, len(x))
    return {name: share**2 * own for name, own in loop.items()}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_agrees_with_single_samples(scaled: bool) -> None:
    """In two micro-batches an update, with and without the factor of a gradient scaler."""
    model, names = model_of(), [f"sample {k}" for k in range(2 * B)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    gns = gnsfast.GradientNoiseScale(model, keep_largest=KEPT, grad_scaler=scaler, window=2)
    expected: list[tuple[float, str, int, float, float]] = []
    for update in range(3):
        model.zero_grad()
        all_: list[float] = []
        with gns.update():
            for a in range(2):
                x = torch.randn(B, D)
                x[update] *= 9
                all_ += sum(norms_of(model, x, 0.5 / B).values()).tolist()  # type: ignore[union-attr]
                with gns.microbatch(B, ids=names[a * B : (a + 1) * B], scale=0.5):
                    loss = 0.5 * mean_loss(model, x)
                    (loss if scaler is None else scaler.scale(loss)).backward()
        median = sorted(all_)[(len(all_) - 1) // 2]
        order = sorted(range(2 * B), key=lambda k: -all_[k])[:KEPT]
        own = [(all_[k] / sum(all_), names[k], update, all_[k], all_[k] / median) for k in order]
        expected = [*expected, *own][-2 * KEPT :]  # a window of two updates
    found = gns.largest()
    assert len(found) == 2 * KEPT and gns.largest(3) == found[:3]
    for one, (share, name, update, sqnorm, times) in zip(found, sorted(expected, reverse=True)):
        assert (one.id, one.update) == (name, update)
        assert one.sqnorm == pytest.approx(sqnorm, rel=1e-5)
        assert one.share == pytest.approx(share, rel=1e-5)
        assert one.times_median == pytest.approx(times, rel=1e-5)
    newest = max(share for share, _, update, *_ in expected if update == 2)
    assert gns.compute().largest == pytest.approx(newest, rel=1e-5)


def test_parameters_in_which_a_sample_stands_out() -> None:
    model, x = model_of(), torch.randn(B, D)
    x[2] *= 20
    norms = norms_of(model, x, 1 / B)
    gns = gnsfast.GradientNoiseScale(model, keep_largest=1)
    with gns.update(B):
        mean_loss(model, x).backward()
    largest = int(sum(norms.values()).argmax())  # type: ignore[union-attr]
    excess = {name: float(own[largest] - own.median()) for name, own in norms.items()}
    [found] = gns.largest()
    assert found.id == (0, 0, 0, largest)
    assert found.parameters == tuple(sorted(excess, key=lambda n: -excess[n])[:3])


@pytest.mark.parametrize("ids", [torch.arange(10, 10 + B), range(10, 10 + B)], ids=["tensor", ""])
def test_ids_of_samples(ids: Any) -> None:
    model, x = model_of(), torch.randn(B, D)
    gns = gnsfast.GradientNoiseScale(model, keep_largest=B)
    with gns.update(B, ids=ids):
        mean_loss(model, x).backward()
    assert sorted(one.id for one in gns.largest()) == [*range(10, 10 + B)]


def test_a_sample_without_numbers_comes_first() -> None:
    model, x = model_of(), torch.randn(B, D)
    gns = gnsfast.GradientNoiseScale(model, keep_largest=2)
    for bad in (False, True):
        x = torch.randn(B, D)
        x[4] *= math.nan if bad else 1.0
        with one_update(gns, B):
            mean_loss(model, x).backward()
    assert gns.largest(1)[0].id == (1, 0, 0, 4)


def test_updates_that_are_not_measured_count() -> None:
    model = model_of()
    gns = gnsfast.GradientNoiseScale(model, keep_largest=1, every=2)
    for _ in range(4):
        with one_update(gns, B):
            mean_loss(model, torch.randn(B, D)).backward()
    assert sorted(one.update for one in gns.largest()) == [0, 2]


def test_refusals() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="keep_largest=16"):
        gnsfast.GradientNoiseScale(model).largest()
    with pytest.raises(ValueError, match="keeps none"):
        with gnsfast.GradientNoiseScale(model).update(B, ids=range(B)):
            pass
    with pytest.raises(ValueError, match="ids has length 2, but num_samples is 6"):
        with gnsfast.GradientNoiseScale(model, keep_largest=1).update(B, ids=[0, 1]):
            pass
    with pytest.raises(ValueError, match="keep_largest must be a number"):
        gnsfast.GradientNoiseScale(model, keep_largest=-1)
    with pytest.raises(ValueError, match="in order"):
        with gnsfast.GradientNoiseScale(model, keep_largest=1).update(2, ids={1, 2}):
            pass
    assert gnsfast.GradientNoiseScale(model, keep_largest=1).largest() == []


def test_updates_without_a_number() -> None:
    """All of one update, and one sample of the next, whose other samples keep their figures."""
    model = model_of()
    table = gnsfast.learn(model, torch.randn(B, D))
    gns = gnsfast.GradientNoiseScale(model, table, keep_largest=B)
    for bad in (slice(None), slice(2, 3)):
        x = torch.randn(B, D)
        x[bad] = math.nan
        with one_update(gns, B):
            mean_loss(model, x).backward()
    first, rest = gns.largest()[: B + 1], gns.largest()[B + 1 :]
    assert all(math.isnan(one.sqnorm) and one.parameters for one in first)
    assert len(rest) == B - 1
    assert all(math.isfinite(one.times_median) and one.share > 0 for one in rest)
    assert rest[0].parameters and math.isnan(gns.compute().largest)


def test_ids_that_are_written_to_again() -> None:
    model, names = model_of(), ["a"] * B
    gns = gnsfast.GradientNoiseScale(model, keep_largest=1)
    with gns.update(B, ids=names):
        mean_loss(model, torch.randn(B, D)).backward()
    names[:] = ["b"] * B
    assert gns.largest()[0].id == "a"


def update_of(gns: gnsfast.GradientNoiseScale, x: Tensor, ids: Any) -> None:
    with gns.update(B, ids=ids):
        mean_loss(gns.model, x).backward()
    gns.model.zero_grad()


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_a_resumed_run_lists_the_same(before: int, tmp_path: Path) -> None:
    """With a window of three updates, of which one is without a number."""
    model, data = model_of(), torch.randn(5, B, D)
    data[2, 4] = math.nan
    kept = lambda: gnsfast.GradientNoiseScale(model, keep_largest=KEPT, window=3)
    whole, first, then = kept(), kept(), kept()
    for update, x in enumerate(data):
        ids = [("file", update, b) for b in range(B)] if update % 2 else torch.arange(B)
        update_of(whole, x, ids)
        if update == before:
            torch.save(first.state_dict(), tmp_path / "state.pt")
            then.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert repr(then.largest()) == repr(first.largest())
            assert repr(then.compute().largest) == repr(first.compute().largest)
        update_of(first if update < before else then, x, ids)
    assert len(whole.largest()) == 3 * KEPT
    assert repr(then.largest()) == repr(whole.largest())  # NaN equals itself in text alone
    assert then.compute().largest == whole.compute().largest


def test_states_hold_ids_as_plain_values(tmp_path: Path) -> None:
    gns = gnsfast.GradientNoiseScale(model_of(), keep_largest=B)
    names = [Path("a/b"), numpy.str_("c"), numpy.int64(4), ("d", numpy.float32(0.5)), None, True]
    update_of(gns, torch.randn(B, D), names)
    assert {one.id for one in gns.largest()} == {*names}
    torch.save(gns.state_dict(), tmp_path / "state.pt")
    gns.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert {one.id for one in gns.largest()} == {"a/b", "c", 4, ("d", 0.5), None, True}


@pytest.mark.parametrize("saved, loaded", [(0, 3), (3, 0), (3, 5)])
def test_states_of_another_number(saved: int, loaded: int) -> None:
    model = model_of()
    gns = gnsfast.GradientNoiseScale(model, keep_largest=saved)
    other = gnsfast.GradientNoiseScale(model, keep_largest=loaded)
    update_of(gns, torch.randn(B, D), None)
    other.load_state_dict(gns.state_dict())
    assert other.compute().trace == gns.compute().trace
    if saved and loaded:
        assert other.largest() == gns.largest()
        assert other.compute().largest == gns.compute().largest
    else:
        assert math.isnan(other.compute().largest)
    update_of(other, torch.randn(B, D), None)
    assert other.compute().updates == 2
    assert (other.compute().largest > 0) == (loaded > 0)
    if loaded:
        assert len(other.largest()) == saved + loaded


def test_states_without_samples_load() -> None:
    """Those of a run that kept none."""
    gns = gnsfast.GradientNoiseScale(model_of(), keep_largest=2)
    update_of(gns, torch.randn(B, D), None)
    state = gns.state_dict()
    del state["means"]["largest"]
    gns.load_state_dict(state)
    assert gns.largest() == [] and math.isnan(gns.compute().largest)

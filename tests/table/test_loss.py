# SPDX-License-Identifier: Apache-2.0
"""Losses that ``learn(loss=...)`` proves, and those whose samples meet or weigh otherwise."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from gnsfast.integrations.trackers import metrics
from gnsfast.table import PROVEN

B, T, D, V = 12, 5, 8, 6

Batch = dict[str, Tensor]


def batch_of(n: int = B) -> Batch:
    labels = torch.randint(V, (n, T))
    for b in range(n):
        labels[b, 1 + b % T :] = -100
    return {"x": torch.randn(n, T, D), "labels": labels, "kind": torch.arange(n) % V}


def tokens(batch: Batch) -> Tensor:
    return (batch["labels"] >= 0).sum(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, V))


CLASS_WEIGHTS = torch.tensor([9.0, 1.0, 2.0, 0.5, 1.0, 4.0])


def of_means(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mean(1), batch["kind"])


def of_sums(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mean(1), batch["kind"], reduction="sum")


def of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def of_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mean(1), batch["kind"], weight=CLASS_WEIGHTS)


def in_batch_softmax(model: nn.Module, batch: Batch) -> Tensor:
    y = F.normalize(model(batch["x"]).mean(1))
    return F.cross_entropy(y @ y.T / 0.1, torch.arange(len(y)))


def of_normal_advantages(model: nn.Module, batch: Batch) -> Tensor:
    values = model(batch["x"]).mean((1, 2))
    return ((values - values.mean()) / values.std() * batch["kind"]).mean()


def of_whitened_values(model: nn.Module, batch: Batch) -> Tensor:
    values = model(batch["x"]).mean((1, 2))
    return (values - values.mean()).square().mean()


def proof(loss: Any, batch: Batch | None = None, **options: Any) -> str:
    batch = batch_of() if batch is None else batch
    return gnsfast.learn(model(), batch, loss=loss, **options).loss


@pytest.mark.parametrize("loss", [of_means, of_sums])
def test_proven(loss: Any) -> None:
    assert proof(loss) == PROVEN
    assert "proven for the model and the loss" in str(gnsfast.learn(model(), batch_of(), loss=loss))


def test_a_factor_is_no_weight() -> None:
    """One that does not depend on the batch is the block's ``scale``, where it varies."""
    assert proof(lambda m, batch: of_means(m, batch) / 4) == PROVEN


def test_weights_of_samples() -> None:
    """The reason holds the weights to give, and with these the loss is proven."""
    batch = batch_of()
    for loss, weights_B in (
        (of_tokens, tokens(batch)),
        (of_classes, CLASS_WEIGHTS[batch["kind"]]),
    ):
        reason = proof(loss, batch)
        relative = weights_B / weights_B.min()
        shown = " : ".join(f"{w:.3g}" for w in relative[:4].tolist())
        assert "other weights than equal ones" in reason and shown in reason, reason
        assert "tokens=weights" in reason
        assert proof(loss, batch, tokens=weights_B) == PROVEN
        assert "other weights than those in tokens=" in proof(loss, batch, tokens=weights_B.flip(0))


@pytest.mark.parametrize("loss", [in_batch_softmax, of_whitened_values])
def test_samples_that_meet(loss: Any) -> None:
    assert "samples meet in it" in proof(loss)


def test_no_number_for_a_single_sample() -> None:
    assert "it is no number for 12 of 12 samples alone" in proof(of_normal_advantages)
    batch = batch_of()
    batch["labels"][3] = -100
    assert "it is no number for 1 of 12 samples alone" in proof(of_tokens, batch)
    assert proof(of_tokens, batch, tokens=tokens(batch)) == PROVEN  # a row without weight


def test_other_losses_that_show_nothing() -> None:
    assert "one sample shows nothing" in proof(of_means, batch_of(1))
    assert "gives it no gradient" in proof(lambda m, batch: 0 * of_means(m, batch))
    assert "not finite" in proof(lambda m, batch: of_means(m, batch) * torch.inf)


def test_what_is_refused() -> None:
    batch = batch_of()
    with pytest.raises(ValueError, match=r"learn\(model, batch, loss=loss, tokens=weights\)"):
        proof(of_tokens, batch, tokens=tokens(batch)[:3])
    with pytest.raises(ValueError, match=r"a tensor \[12\]"):
        gnsfast.learn(model(), batch["x"], tokens=tokens(batch))


def test_pairs_are_samples() -> None:
    """A loss of pairs, rows b and b + n, is proven with the pairs that ``take`` cuts out."""
    n = 6

    def pairs(batch: Tensor, samples: list[int]) -> Tensor:
        return torch.cat([batch[:n][samples], batch[n:][samples]])

    def preference(model: nn.Module, x: Tensor) -> Tensor:
        better, worse = model(x).mean((1, 2)).chunk(2)
        return -F.logsigmoid(better - worse).mean()

    x = torch.randn(2 * n, T, D)
    table = gnsfast.learn(model(), x, loss=preference, take=pairs, num_samples=n)
    assert table.loss == PROVEN and not table.left_out


def test_tables_keep_it() -> None:
    """Saved, loaded and joined tables say of the loss what was found."""
    proven, not_proven = (gnsfast.learn(model(), batch_of(), loss=f) for f in (of_means, of_tokens))
    without = gnsfast.learn(model(), batch_of()["x"])
    assert (proven | not_proven).loss == (not_proven | proven).loss == not_proven.loss
    assert (proven | without).loss == (without | proven).loss == PROVEN
    assert "learn(model, batch, loss=...)" in str(without)


def test_a_block_without_the_weights_that_were_proven() -> None:
    net, batch = model(), batch_of()
    table = gnsfast.learn(net, batch, loss=of_tokens, tokens=tokens(batch))
    assert table.has_weights and (table | gnsfast.learn(net, batch["x"])).has_weights
    gns = gnsfast.GradientNoiseScale(net, table)
    with pytest.raises(ValueError, match=r"Give those of this batch: gns.update\(n, tokens="):
        with gns.update(len(batch["x"])):
            pass
    equal = gnsfast.learn(net, batch, loss=of_means, tokens=torch.ones(len(batch["x"])))
    assert equal.loss == PROVEN and not equal.has_weights


def test_weights_that_are_a_list() -> None:
    gns = gnsfast.GradientNoiseScale(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"a number or a tensor \[2\], not list"):
        with gns.update(2, tokens=[1.0, 2.0]):  # type: ignore[arg-type]
            pass


def test_nothing_is_changed() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(model(), nn.Dropout(0.5)).train()
    before = [p.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    gnsfast.learn(net, batch_of(), loss=of_tokens)
    assert net.training and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    torch.set_rng_state(state)
    expected = batch_of()
    torch.set_rng_state(state)
    torch.testing.assert_close(batch_of()["x"], expected["x"], rtol=0, atol=0)


def test_class_weights_as_tokens() -> None:
    """An update with floats as weights has the noise scale of single-sample gradients in float64,
    and the result says what was not proven.
    """
    torch.manual_seed(0)
    net = model().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch_of().items()}
    weights_B = CLASS_WEIGHTS.double()[batch["kind"]]
    gns = gnsfast.GradientNoiseScale(net)
    updates = []
    for _ in range(6):
        chosen = torch.randint(B, (5,))
        some = {k: v[chosen] for k, v in batch.items()}
        net.zero_grad()
        with gns.update(5, tokens=weights_B[chosen]):
            loss = of_classes_double(net, some)
            loss.backward()
        each = torch.stack(
            [gradient(net, {k: v[b : b + 1] for k, v in some.items()}) for b in range(5)]
        )
        updates.append((weights_B[chosen], weights_B[chosen][:, None] * each))
    n, mean = 5, torch.stack([w.mean() for w, _ in updates]).mean()
    above = sum(s.sum(0).square().sum() - s.square().sum() for _, s in updates)
    below = sum(w.sum().square() - w.square().sum() for w, _ in updates)
    square = above / below
    of_L = sum(w.square().mean() for w, _ in updates) / len(updates) / mean**2
    trace = sum(s.square().sum(1).mean() for _, s in updates) / len(updates) / mean**2
    result = gns.compute()
    assert result.grad_sqnorm == pytest.approx(square.item(), rel=1e-6)
    assert result.trace == pytest.approx((trace - of_L * square).item(), rel=1e-6)
    assert result.samples == 6 * n


def of_classes_double(net: nn.Module, batch: Batch) -> Tensor:
    logits = net(batch["x"]).mean(1)
    return F.cross_entropy(logits, batch["kind"], weight=CLASS_WEIGHTS.double())


def gradient(net: nn.Module, batch: Batch) -> Tensor:
    grads = torch.autograd.grad(of_classes_double(net, batch), [*net.parameters()])
    return torch.cat([g.flatten() for g in grads])


def test_the_result_says_what_is_not_proven(caplog: pytest.LogCaptureFixture) -> None:
    net, batch = model(), batch_of()
    gns = gnsfast.GradientNoiseScale(net, gnsfast.learn(net, batch, loss=of_tokens))
    with caplog.at_level(logging.WARNING, "gnsfast"):
        for _ in range(6):
            net.zero_grad()
            with gns.update(B):
                of_tokens(net, batch).backward()
        assert "Proven for the model, not for the loss: its samples have other" in str(
            gns.compute()
        )
        gns.compute()
    assert sum("not for the loss" in r.message for r in caplog.records) == 1


def unequal(scale: float | Tensor, mean: bool) -> gnsfast.NoiseScale:
    net, batch = model(), batch_of()
    gns = gnsfast.GradientNoiseScale(net, loss_reduction="mean" if mean else "sum")
    for _ in range(6):
        net.zero_grad()
        with gns.update():
            for part in (slice(0, 3), slice(3, 9), slice(9, 12)):
                some = {k: v[part] for k, v in batch.items()}
                with gns.microbatch(len(some["x"]), tokens=tokens(some), scale=scale):
                    loss = of_tokens(net, some)
                    (loss * scale * (1 if mean else tokens(some).sum())).backward()
    return gns.compute()


def test_micro_batches_that_weigh_tokens_unequally(caplog: pytest.LogCaptureFixture) -> None:
    """A mean in each micro-batch, then 1 / A: the result, the log and the trackers say so."""
    with caplog.at_level(logging.WARNING, "gnsfast"):
        result = unequal(1 / 3, mean=True)
    a = 1 / torch.tensor([6.0, 19.0, 8.0])  # tokens: 1 + 2 + 3; 4 + 5 + 1 + 2 + 3 + 4; 5 + 1 + 2
    a_B = torch.cat([a[0].expand(3), a[1].expand(6), a[2].expand(3)])
    rms = a_B.square().mean().sqrt() / (3 / torch.tensor(33.0))
    assert result.unequal == pytest.approx(rms.item(), rel=1e-6)
    assert "Micro-batches weigh tokens unequally" in str(result)
    assert sum("weigh tokens unequally" in r.message for r in caplog.records) == 1
    assert metrics(result)["gns/unequal"] == result.unequal
    whole = unequal(1 / 33, mean=False)
    assert whole.unequal == pytest.approx(1.0, abs=1e-6)
    assert "unequally" not in str(whole) and "gns/unequal" not in metrics(whole)

# SPDX-License-Identifier: Apache-2.0
"""``verify`` gives the right verdict, and leaves the model as it found it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(7, 5), nn.Dropout(0.5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7)
        self.norm.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.tokens(ids))))


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 7, (4, 9)), "labels": torch.randint(0, 7, (4, 9))}


def test_right() -> None:
    model = Model()
    table = gnsfast.verify(model, mean_loss, batch())
    assert table.ok
    assert {r.parameter: r.verdict for r in table.rows} == {
        "tokens.weight": "ok",
        "norm.weight": "ok",
        "norm.bias": "frozen",
        "head.weight": "ok",
        "head.bias": "ok",
    }
    assert "per-sample norms verified" in str(table)


def test_sum_and_token_mean() -> None:
    model, data = Model(), batch()
    total = gnsfast.verify(
        model, lambda m, b: 36 * mean_loss(m, b), data
    )  # a mean, whatever its factor
    assert total.ok
    assert gnsfast.verify(
        model,
        lambda m, b: F.cross_entropy(m(b["ids"]).mT, b["labels"], reduction="sum"),
        data,
        loss_reduction="sum",
    ).ok
    data["labels"][0, 2:] = -100
    tokens = (data["labels"] != -100).sum(1)
    unweighted = gnsfast.verify(model, mean_loss, data)
    assert not unweighted.ok and "loss_reduction (or weights) is not that" in str(unweighted)
    assert gnsfast.verify(model, mean_loss, data, weights=tokens / tokens.sum()).ok


def test_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose norms lie gets the verdict, and only that one."""
    model = Model()
    table = gnsfast.learn(model, batch()["ids"])
    honest = gnsfast.functional.linear

    def lying(x: Tensor, *args: Tensor, **options: int) -> Tensor:
        y: Tensor = honest(x, *args, **options)
        args[2].register_hook(lambda g: g * torch.tensor([1.0] * 3 + [1.1] + [1.0] * 2))
        return y

    monkeypatch.setattr(gnsfast.functional, "linear", lying)
    found = gnsfast.verify(model, mean_loss, batch(), table=table)
    verdicts = {r.parameter: r.verdict for r in found.rows}
    assert verdicts["head.weight"] == "wrong" and verdicts["tokens.weight"] == "ok"


def test_samples_tied_by_the_loss() -> None:
    model = Model()

    def contrastive(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["ids"]).mean(1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

    assert not gnsfast.verify(model, contrastive, batch()).loss_splits


def test_sequence_first_by_mistake_with_as_many_tokens() -> None:
    """T = B: no shape can tell, the loop does."""
    model, x = nn.Linear(5, 3), torch.randn(4, 4, 5)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    assert gnsfast.verify(model, loss, x).ok
    assert not gnsfast.verify(model, loss, x, batch_dim=1).ok
    table = gnsfast.learn(model, torch.randn(6, 4, 5), num_samples=4)
    assert gnsfast.verify(model, loss, x, batch_dim=1, table=table).ok


def test_half_precision() -> None:
    assert gnsfast.verify(Model().bfloat16(), mean_loss, batch()).ok


def test_leaves_the_model_as_it_was() -> None:
    model = Model()
    mean_loss(model, batch()).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    copies = {n: None if g is None else g.clone() for n, g in grads.items()}
    model.norm.eval()
    state = torch.get_rng_state()
    gnsfast.verify(model, mean_loss, batch())
    del state  # batch() drew from it; verify itself must not
    before = torch.get_rng_state()
    gnsfast.verify(
        model, mean_loss, {"ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 3).long()}
    )
    assert torch.equal(before, torch.get_rng_state())
    assert model.training and not model.norm.training
    for n, p in model.named_parameters():
        assert p.grad is grads[n]
        assert p.grad is None or torch.equal(p.grad, copies[n])


def test_uncovered_is_listed() -> None:
    model = gnsfast.configure(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), exclude=["1"])
    table = gnsfast.verify(model, lambda m, x: m(x).mean(), torch.randn(4, 5))
    assert table.ok and [r.verdict for r in table.rows] == ["ok", "ok", "uncovered", "uncovered"]
    assert table.rows[2].reason == "excluded"


def test_wrong_arguments() -> None:
    model = nn.Linear(5, 5)
    with pytest.raises(ValueError, match="at least one tensor"):
        gnsfast.verify(model, lambda m, x: m(x), [1])
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        gnsfast.verify(model, lambda m, x: m(x).sum(), torch.randn(4, 5), loss_reduction="tokens")


def test_one_image_with_its_channels_last() -> None:
    """Plain torch is wrong here, so the loop has to take a contiguous copy."""
    model, image_HWC = nn.BatchNorm2d(3).eval(), torch.randn(6, 5, 3)
    x, r = image_HWC.permute(2, 0, 1)[None], torch.randn(1, 3, 6, 5)
    loss = lambda m, b: (m(b[0]) * b[1]).sum()  # noqa: E731
    assert gnsfast.verify(model, loss, (x, r)).ok

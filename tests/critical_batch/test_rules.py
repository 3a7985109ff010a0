# SPDX-License-Identifier: Apache-2.0
"""Every rule against its paper's numbers or its formula, and what optimizers make of them."""

import math
from typing import Any

import pytest
import torch

from gnsfast.critical_batch.rules import NAMES, RULES, Rules


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def adamw(**options: Any) -> torch.optim.AdamW:
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    return torch.optim.AdamW(parameter(), **settings)


def test_goyal() -> None:
    """0.1 for 256 images is 3.2 for 8,192."""
    assert 0.1 * Rules("linear").lr_factor(8192 / 256) == pytest.approx(3.2)


def test_malladi() -> None:
    optimizer = adamw()
    Rules("sqrt", "sde").apply(optimizer, 4)
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(2e-3) and group["eps"] == pytest.approx(5e-9)
    assert group["betas"] == pytest.approx((0.6, 0.8)) and group["weight_decay"] == 0.1


def test_marek() -> None:
    """Their runs have 0.95 for 512 samples and 0.9999 for 1, of 1,024 tokens each."""
    optimizer = adamw()
    Rules("none", "half_life").apply(optimizer, 1 / 512)
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    assert beta1 == 0.9 and round(beta2, 4) == 0.9999
    tokens = [math.log(0.5) / math.log(b) * n * 1024 for b, n in ((0.95, 512), (beta2, 1))]
    assert tokens[0] == pytest.approx(tokens[1])


def test_marin() -> None:
    """Their recipe in issue 4567, clip(0.999^(B/32), 0.95, 0.9999) with beta1 0.9062."""
    table = {32: 0.999, 64: 0.998, 128: 0.996, 256: 0.992, 512: 0.984, 1024: 0.968, 2048: 0.95}
    for batch, beta2 in table.items():
        optimizer = adamw(betas=(0.9062, 0.999))
        Rules(betas="half_life").apply(optimizer, batch / 32)
        assert optimizer.param_groups[0]["betas"][1] == pytest.approx(beta2, abs=6e-4)
        assert Rules(betas="half_life").floored(adamw(betas=(0.9, 0.999)), batch / 32) == (
            batch == 2048
        )


@pytest.mark.parametrize(
    "betas, k, beta2",
    [
        ((0.9, 0.95), 16, 0.95),  # 0.44 without a floor
        ((0.9, 0.92), 4, 0.92),  # below the floor already
        ((0.9, 0.92), 0.5, math.sqrt(0.92)),
        ((0.98, 0.999), 64, 0.98**2),  # beta1² is above 0.95
    ],
)
def test_the_floor_of_beta2(betas: tuple[float, float], k: float, beta2: float) -> None:
    for path in ((k,), (math.sqrt(k), math.sqrt(k))):  # growth in two steps is growth in one
        optimizer = adamw(betas=betas)
        for part in path:
            Rules(betas="half_life").apply(optimizer, part)
        assert optimizer.param_groups[0]["betas"] == pytest.approx((betas[0], beta2), rel=1e-12)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99)})


class AdamW8bit(Lion):
    """As bitsandbytes has it: no class of torch's."""


class MuonAdamW(AdamW8bit):
    """As nanochat's, which trains matrices with Muon."""


class Wrapped:
    """As accelerate's ``AcceleratedOptimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.parametrize("lr", ["sqrt", "linear"])
@pytest.mark.parametrize("kind", [Lion, MuonAdamW, torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_without_a_rule_is_refused_by_name(kind: Any, lr: str) -> None:
    optimizer = kind(parameter())
    before = optimizer.param_groups[0]["lr"]
    said = f"no rule says how the learning rate of {kind.__name__} follows.*pass lr='none'"
    with pytest.raises(ValueError, match=said):
        Rules(lr).apply(optimizer, 2)
    with pytest.raises(ValueError, match="learning rate of Wrapped"):
        Rules(lr).check(Wrapped(optimizer), 2)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == before
    Rules(lr).check(optimizer, 1)
    Rules("none").apply(optimizer, 2)
    Rules("keep").apply(optimizer, 2)


def test_optimizers_with_a_rule() -> None:
    torchs = torch.optim.RMSprop, torch.optim.NAdam, torch.optim.SGD, AdamW8bit
    for kind in torchs:
        Rules("sqrt").check(kind(parameter()), 4)  # type: ignore[arg-type]
    Rules("sqrt").check(Wrapped(adamw()), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr, factor", [("sqrt", 2.0), ("linear", 1.0), ("keep", 4.0)])
def test_timescale(lr: str, factor: float) -> None:
    """B / (η λ D) stays as it was."""
    optimizer = adamw()
    Rules(lr, weight_decay="timescale").apply(optimizer, 4)
    group = optimizer.param_groups[0]
    assert group["weight_decay"] == pytest.approx(0.1 * factor)
    assert 4 / (group["lr"] * group["weight_decay"]) == pytest.approx(1 / (1e-3 * 0.1))


def test_timescale_holds_the_weights_in_tokens() -> None:
    """Without gradients, two steps of a batch shrink weights as one step of twice the batch."""
    left = []
    for k, steps in ((1, 2), (2, 1)):
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
        Rules("sqrt", weight_decay="timescale").apply(optimizer, k)
        for _ in range(steps):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        left.append(1 - weight.item())
    assert left[0] == pytest.approx(left[1], rel=1e-3) and left[0] == pytest.approx(2e-4, rel=1e-3)


def test_timescale_needs_the_factor_of_the_learning_rate() -> None:
    """Which ``"none"`` leaves to the user's code: 4 times the decay would be wrong by that."""
    with pytest.raises(ValueError, match="lr='none' leaves that to your own code: pass lr='keep'"):
        Rules("none", weight_decay="timescale")


@pytest.mark.parametrize("lr", sorted(NAMES["lr"].keys() - {"none"}))
@pytest.mark.parametrize("betas", NAMES["betas"])
@pytest.mark.parametrize("decay", NAMES["weight_decay"])
def test_growth_in_two_steps_is_growth_in_one(lr: str, betas: str, decay: str) -> None:
    rules, found = Rules(lr, betas, decay), []
    for path in ((6,), (2, 3)):
        optimizer = adamw(betas=(0.95, 0.99))
        for k in path:
            rules.apply(optimizer, k)
        group = optimizer.param_groups[0]
        found.append([group["lr"], *group["betas"], group["eps"], group["weight_decay"]])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_groups_keep_their_own_values() -> None:
    rate = torch.tensor(0.5)
    groups = [
        {"params": parameter(), "lr": rate, "weight_decay": 0.0},
        {"params": parameter(), "betas": (0.8, 0.99), "weight_decay": 0.3},
        {"params": parameter(), "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, foreach=False)
    Rules("sqrt", "half_life", "timescale").apply(optimizer, 4)
    first, second, third = optimizer.param_groups
    assert first["lr"] is rate and rate.item() == 1.0 and first["weight_decay"] == 0.0
    assert second["betas"] == (0.8, 0.99**4) and second["weight_decay"] == pytest.approx(0.6)
    assert third["lr"] == pytest.approx(2e-2) and third["betas"] == (0.9, 0.999**4)


def test_groups_without_betas() -> None:
    """As Muon's beside AdamW's."""
    optimizer = adamw()
    optimizer.add_param_group({"params": parameter()})
    del optimizer.param_groups[1]["betas"], optimizer.param_groups[1]["eps"]
    Rules("none", "sde").apply(optimizer, 2)
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.8, 0.9))
    assert "betas" not in optimizer.param_groups[1]


@pytest.mark.parametrize(
    "rules, kind, options, said",
    [
        (Rules(betas="half_life"), torch.optim.SGD, {}, "SGD has no betas.*betas='keep'"),
        (Rules(betas="sde"), torch.optim.AdamW, {}, "16 times as large.*half_life"),
        (Rules(weight_decay="timescale"), torch.optim.Adam, {"weight_decay": 0.1}, "use AdamW"),
        (Rules(weight_decay="timescale"), torch.optim.LBFGS, {}, "LBFGS has no weight decay"),
    ],
)
def test_refused_before_anything_changes(rules: Any, kind: Any, options: Any, said: str) -> None:
    optimizer = kind(parameter(), lr=1.0, **options)
    with pytest.raises(ValueError, match=said):
        rules.apply(optimizer, 16)
    assert optimizer.param_groups[0]["lr"] == 1.0
    with pytest.raises(ValueError, match=said), rules.moved(optimizer, 16, 3.0):
        pass
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_moved_for_a_block() -> None:
    optimizer = adamw()
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    with pytest.raises(KeyError), Rules("keep", "sde", "timescale").moved(optimizer, 2, 3.0):
        group = optimizer.param_groups[0]
        assert group["lr"].item() == 1.5 and group["weight_decay"] == pytest.approx(0.1 * 2 / 3)
        assert group["betas"] == pytest.approx((0.8, 0.9)) and group["eps"] == 1e-8 / math.sqrt(2)
        raise KeyError
    group = optimizer.param_groups[0]
    assert group["lr"] is rate and rate.item() == 0.5
    assert {name: value for name, value in group.items() if name != "params"} == before


def test_names() -> None:
    for argument, name in (("lr", "log"), ("betas", "tokens"), ("weight_decay", 1)):
        with pytest.raises(ValueError, match=f"{argument} must be '"):
            Rules(**{argument: name})
    assert all(rule.source and rule.holds for rule in RULES if rule.tested)


def test_groups_that_share_a_tensor_move_once() -> None:
    """torch gives all groups the one tensor that the optimizer was made with."""
    groups = [{"params": parameter()}, {"params": parameter()}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-3), foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    Rules().apply(optimizer, 4)
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([2e-3] * 2)


@pytest.mark.parametrize(
    "kind, options",
    [("RMSprop", {}), ("Adagrad", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adamax", {})],
)
def test_decay_in_the_gradient_has_no_timescale(kind: str, options: dict[str, Any]) -> None:
    make: Any = getattr(torch.optim, kind)
    optimizer = make(parameter(), lr=1e-3, weight_decay=0.1, **options)
    with pytest.raises(ValueError, match=f"{kind} adds its weight decay to the gradient"):
        Rules(weight_decay="timescale").apply(optimizer, 4)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    Rules("keep", weight_decay="timescale").apply(
        make(parameter(), lr=1e-3, **options), 4
    )  # has none


@pytest.mark.parametrize("k", [0, -1, math.nan, math.inf])
def test_factors_that_no_batch_grows_by(k: float) -> None:
    with pytest.raises(ValueError, match="positive, finite factor"):
        Rules().apply(adamw(), k)

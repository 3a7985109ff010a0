# SPDX-License-Identifier: Apache-2.0
"""Seesaw and its opposite, to switch late: formulas of the papers, what is refused, what trains."""

import json
import math
import re
from typing import Any

import pytest
import torch
from controller_cases import CHECK, TOTAL, make, noise
from typer.testing import CliRunner

from gnsfast.cli.app import app
from gnsfast.critical_batch import BatchSizeSchedule, Rules, ScheduledBatchSize, late_switch, seesaw
from gnsfast.critical_batch.control import constant, cosine, linear, wsd
from gnsfast.critical_batch.control.token_schedules import Shape
from gnsfast.critical_batch.seesaw import falls
from gnsfast.interval import Interval

TOKENS, LENGTH = 1_000_000, 10
FALLING = {
    "cosine": cosine(TOKENS, warm_up=50_000, final=0.1),
    "linear": linear(TOKENS, final=0.1),
    "wsd": wsd(TOKENS, decay=400_000, warm_up=20_000, final=0.1),
}


def made(shape: Shape, **changes: object) -> BatchSizeSchedule:
    settings = {"total_tokens": TOKENS, "tokens_per_sample": LENGTH, "critical": 1e6}
    return seesaw(shape, 32, **settings | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("growth", [2, 4])
@pytest.mark.parametrize("name", FALLING)
def test_algorithm_1(name: str, growth: int) -> None:
    """Where the learning rate has fallen by α: η/√α, α B. After k falls η α^(-k/2), B α^k."""
    shape = FALLING[name]
    schedule = made(shape, growth=growth)
    assert len(schedule.thresholds) == 1 + int(math.log(10, growth))
    for k, (tokens, size) in enumerate(schedule.thresholds):
        assert size == 32 * growth**k
        if k:
            assert shape(tokens) <= growth**-k < shape(tokens - LENGTH) and tokens % LENGTH == 0
            rate = shape(tokens) * Rules("sqrt").lr_factor(size / 32)
            assert rate == pytest.approx(growth ** (-k / 2), rel=1e-4)


@pytest.mark.parametrize("rule, power", [("sqrt", 0.5), ("linear", 1.0)])
def test_what_the_theorems_hold(rule: str, power: float) -> None:
    """η / √B for normalized SGD (Adam), η / B for SGD: at every token as without Seesaw, because α
    √β, or α β, is that of the schedule. By the second, SGD keeps its learning rate at each cut.
    """
    shape = FALLING["cosine"]
    schedule = made(shape)
    for tokens in range(0, TOKENS, 9973):
        factor, size = schedule.lr_factor_at(tokens, rule), schedule.batch_size_at(tokens)
        assert shape(tokens) * factor / (size / 32) ** power == pytest.approx(shape(tokens))
    if rule == "linear":
        tokens, size = schedule.thresholds[1]
        assert shape(tokens) * Rules(rule).lr_factor(size / 32) == pytest.approx(1, rel=1e-4)


def test_the_limit_of_the_paper() -> None:
    """With ever smaller cuts a quarter of a cosine takes 2/π of the steps: 36.3 % fewer."""
    growth = 1.001
    cuts = falls(lambda t: math.cos(math.pi / 2 * min(1, t / TOKENS)), TOKENS, growth)
    ends = [*cuts, TOKENS]
    steps = sum((b - a) / growth**k for k, (a, b) in enumerate(zip([0, *cuts], ends)))
    assert steps / TOKENS == pytest.approx(2 / math.pi, rel=2e-3)


def test_refused_above_the_critical_batch() -> None:
    """By the lower end of its interval, as a controller grows."""
    shape = FALLING["cosine"]
    assert made(shape, critical=256).thresholds[-1][1] == 256
    assert made(shape, critical=Interval(400.0, 256.0, 500.0)).thresholds[-1][1] == 256
    said = r"256 samples from \d+ tokens .* more than .* at least 200 samples: .*max_batch_size=128"
    for critical in (200, Interval(400.0, 200.0, 500.0)):
        with pytest.raises(ValueError, match=said):
            made(shape, critical=critical)
    capped = made(shape, critical=200, max_batch_size=128)
    assert [size for _, size in capped.thresholds] == [32, 64, 128]
    assert capped.thresholds == made(shape).thresholds[:3]
    with pytest.raises(ValueError, match="32 samples from 0 tokens .* smaller first batch"):
        made(shape, critical=20)
    with pytest.raises(ValueError, match="critical must be a number of at least 1, not nan"):
        made(shape, critical=Interval(400.0, math.nan, 500.0))


def test_a_decay_to_nothing_needs_an_end() -> None:
    """A rate that falls to 0 is halved without end: the stages that no step reaches are left out,
    and what is left passes any critical batch size.
    """
    shape = cosine(TOKENS)
    with pytest.raises(ValueError, match="pass max_batch_size=1024"):
        made(shape, critical=1500)
    assert made(shape, critical=1500, max_batch_size=1500).thresholds[-1][1] == 1024
    assert all(stage.steps for stage in made(shape).stages)


def test_shapes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="never falls to half of its peak.*final=0.4"):
        made(cosine(TOKENS, final=0.6))
    with pytest.raises(ValueError, match="rises again.*restarts"):
        made(lambda tokens: 0.6 + 0.4 * math.cos(tokens / 50_000))
    with pytest.raises(ValueError, match="never falls"):
        made(constant())


def test_late() -> None:
    """Nothing changes before ``late``; there the batch is the one that the falls so far ask for."""
    shape = FALLING["cosine"]
    early, late = made(shape), made(shape, late=0.7)
    due = [size for tokens, size in early.thresholds if tokens <= 0.7 * TOKENS][-1]
    assert due == 64 and early.thresholds[1][0] < 0.7 * TOKENS
    assert late.thresholds == ((0, 32), (700_000, due), *early.thresholds[2:])
    assert made(shape, late=1.0).thresholds == ((0, 32),)


def test_two_stages_late() -> None:
    """1,024 then 2,560 samples at 75 % of 1T tokens: the largest run of the paper."""
    schedule = late_switch(
        1024, 2560, late=0.75, total_tokens=1e12, tokens_per_sample=4096, critical=4096
    )
    assert schedule.thresholds == ((0, 1024), (183_105_469 * 4096, 2560))
    with pytest.raises(ValueError, match="2,560 samples.*more than.*at least 2,000 samples"):
        late_switch(1024, 2560, total_tokens=1e12, tokens_per_sample=4096, critical=2000)


def test_trained() -> None:
    """``ScheduledBatchSize`` with ``lr_lambda(shape)``: just after each cut LR / √2 once more."""
    shape = FALLING["linear"]
    schedule = made(shape)
    batch = ScheduledBatchSize(schedule)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, batch.lr_lambda(shape))
    rates = []
    while batch.tokens < TOKENS:
        decision = batch.update(batch.tokens + batch.batch_tokens)
        optimizer.step()
        scheduler.step()
        if decision is not None:
            batch.apply(decision, optimizer)
            rates.append(optimizer.param_groups[0]["lr"] / 1e-3)
    assert rates == pytest.approx([2 ** (-k / 2) for k in (1, 2, 3)], rel=1e-2)
    stages = schedule.stages[1:]
    assert rates == [shape(s.tokens) * math.sqrt(s.batch_size / 32) for s in stages]
    saved = (5 / 18) / 2 + (5 / 36) * 3 / 4 + (1 / 36) * 7 / 8  # a line to 0.1: 5/9, 5/6, 35/36
    assert schedule.steps_saved().share == pytest.approx(saved, abs=1e-3)


def test_a_controller_grows_at_the_falls_and_where_the_noise_scale_allows_it() -> None:
    """Evidence for 64 from the start: 32 only where the rate is half, 64 only where it is a
    quarter; without evidence never, and never beyond the critical batch size.
    """
    shape = wsd(TOTAL, decay=TOTAL // 2)  # half at 75 %, a quarter at 87.5 %

    def grown(lower: float) -> list[tuple[int, int]]:
        controller = make(shape=shape, warm_up_until=1.0, patience=1)
        sizes = []
        for tokens in range(CHECK, TOTAL, CHECK):
            decision = controller.update(tokens, noise(lower))
            if decision is not None and decision.new != decision.old:
                sizes.append((tokens, decision.new))
        return sizes

    assert grown(40.0) == [(75_000, 32), (88_000, 64)]  # critical: 80
    assert grown(20.0) == [(75_000, 32)]  # critical: 40
    assert not grown(10.0)
    assert make(shape=shape).state_dict()["settings"]["falls"][:2] == [75_000, 87_500]


def invoke(*arguments: str, source: str = "0:32", code: int = 0) -> str:
    given = ["schedule", source, *arguments, "--total-tokens", "1M", "--tokens-per-sample", "10"]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def sizes_of(found: dict[str, Any]) -> list[tuple[int, int]]:
    return [(s["threshold_tokens"], s["batch_size_samples"]) for s in found["stages"]]


SEESAW = ("--seesaw", "linear", "--b-crit", "300:128:400")


def test_command() -> None:
    given = ("--seesaw", "cosine", "--warm-up", "50K", "--b-crit", "300:256:400")
    found = json.loads(invoke(*given, "--json"))
    schedule = made(FALLING["cosine"])
    assert sizes_of(found) == [*schedule.thresholds]
    rates = [stage["lr_of_peak"] for stage in found["stages"][1:]]
    assert rates == pytest.approx([2 ** (-k / 2) for k in (1, 2, 3)], rel=1e-2)
    assert found["shape"] == "cosine" and "your cosine schedule" in " ".join(invoke(*given).split())
    found = json.loads(invoke("--late", "0.75", "--max-batch", "80", "--b-crit", "99", "--json"))
    assert sizes_of(found) == [(0, 32), (750_000, 80)]
    assert found["stages"][1]["lr_of_peak"] is None


@pytest.mark.parametrize("tool", ["megatron", "olmo-core", "huggingface", "lightning"])
def test_exports(tool: str) -> None:
    given = (*SEESAW, "--max-batch", "128", "--export", tool, "--per-device-batch", "32")
    assert "555560" in invoke(*given).replace("55556K", "555560")


@pytest.mark.parametrize(
    "given, said",
    [
        ((*SEESAW, "--max-batch", "64", "--export", "levanter"), "levanter counts .* in steps"),
        (SEESAW, "256 samples from .* at least 128 samples: pass max_batch_size=128 .--max-batch"),
        (("--seesaw", "linear"), "pass --b-crit"),
        ((*SEESAW, "--lr", "keep"), "pass --lr sqrt"),
        (("--seesaw", "step", "--b-crit", "99"), "--seesaw must be 'cosine', 'linear' or 'wsd'"),
        (("--seesaw", "wsd", "--b-crit", "99"), "--seesaw wsd needs --decay"),
        ((*SEESAW, "--decay", "9"), "no other does"),
        (("--late", "0.5", "--b-crit", "99"), "--late without --seesaw needs --max-batch"),
    ],
)
def test_command_refuses(given: tuple[str, ...], said: str) -> None:
    result = invoke(*given, code=2)
    assert re.search(said, result), result


def test_thresholds_and_seesaw() -> None:
    assert "pass the first batch size alone, '0:32'" in invoke(
        *SEESAW, source="0:32 10K:64", code=2
    )

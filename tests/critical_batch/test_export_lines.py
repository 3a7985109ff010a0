# SPDX-License-Identifier: Apache-2.0
"""Lines that move the learning rate in other frameworks, run in small copies of their loops."""

import json
import math
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_schedule
import torch
from typer.testing import CliRunner

from gnsfast.cli.app import app
from gnsfast.critical_batch import BatchSizeSchedule, Rules, exports

LENGTH, TOTAL = 10, 6000
CASES = [
    [(0, 4)],
    [(0, 4), (200, 8), (1480, 32)],
    [(0, 4), (201, 12), (3000, 4)],
    [(0, 8), (1, 16), (2, 32)],
]


def schedule_of(thresholds: list[tuple[int, int]]) -> BatchSizeSchedule:
    return BatchSizeSchedule(thresholds, TOTAL, tokens_per_sample=LENGTH)


walked = partial(test_schedule.walked, total=TOTAL, of_a_sample=LENGTH)


def decay(share: float) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, share))) / 2


class Rates:
    """The part of Megatron-LM's ``OptimizerParamScheduler`` that sets learning rates."""

    def __init__(self) -> None:
        self.num_steps, self.group = 0, {"max_lr": 3e-3}
        self.step(0)

    def get_lr(self, param_group: dict[str, float]) -> float:
        return param_group["max_lr"] * decay(self.num_steps * LENGTH / TOTAL)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        self.group["lr"] = self.get_lr(self.group)


@pytest.mark.parametrize("rule", ["sqrt", "linear", "keep"])
@pytest.mark.parametrize("thresholds", CASES)
def test_megatron(
    thresholds: list[tuple[int, int]], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("megatron.core.optimizer_param_scheduler")
    module.OptimizerParamScheduler = type("OptimizerParamScheduler", (Rates,), {})
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(exports.megatron_lines(schedule_of(thresholds), rule), {})
    rates = module.OptimizerParamScheduler()
    for tokens, size in walked(thresholds):
        factor = Rules(rule).lr_factor(size / thresholds[0][1])
        assert rates.group["lr"] == pytest.approx(3e-3 * decay(tokens / TOTAL) * factor)
        rates.step(size)
    resumed = module.OptimizerParamScheduler()
    resumed.step(rates.num_steps)  # as its load_state_dict does
    assert resumed.group["lr"] == rates.group["lr"]


NANOGPT = """
while True:
{lines}
    rates.append(lr)
    sizes.append(gradient_accumulation_steps * batch_size * processes)
    iter_num += 1
    if iter_num > max_iters:
        break
"""


@pytest.mark.parametrize("thresholds", CASES)
def test_nanogpt(thresholds: list[tuple[int, int]]) -> None:
    """Its loop takes the schedule's steps, with a decay in tokens."""
    lines = exports.nanogpt_lines(schedule_of(thresholds), micro_batch=2, processes=2)
    settings, _, loop = lines.partition("# in the loop\n")
    first = thresholds[0][1] * LENGTH
    scope: dict[str, Any] = {"iter_num": 0, "batch_size": 2, "processes": 2, "decay_lr": True}
    scope |= {"rates": [], "sizes": [], "get_lr": lambda it: 3e-3 * decay(it * first / TOTAL)}
    exec(settings + NANOGPT.format(lines=loop), scope)
    steps = walked(thresholds)
    assert scope["sizes"] == [size for _, size in steps]
    assert scope["lr_decay_iters"] == TOTAL // first
    assert scope["rates"] == pytest.approx(
        [3e-3 * decay(t / TOTAL) * math.sqrt(size / thresholds[0][1]) for t, size in steps]
    )
    with pytest.raises(
        ValueError, match="a multiple of the samples of one forward pass, which is 12"
    ):
        exports.nanogpt_lines(schedule_of(thresholds), micro_batch=6, processes=2)


def test_lightning() -> None:
    schedule = BatchSizeSchedule([(0, 4), (400, 8), (1200, 32)], TOTAL, LENGTH)
    found = exports.lightning(schedule, samples_per_batch=4, samples_per_epoch=20)
    assert found.scheduling.keys() == found.lr_factors.keys()
    lines = textwrap.indent(exports.lightning_lines(found.lr_factors), "    ")
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def configure_optimizers(optimizer):\n{lines}", scope)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    given = scope["configure_optimizers"](optimizer)["lr_scheduler"]
    rates = []
    assert given["interval"] == "epoch"
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"] / 0.1)
        optimizer.step()
        given["scheduler"].step()
    assert rates == pytest.approx([1, 1] + [math.sqrt(2)] * 4 + [math.sqrt(8)] * 2)
    options = {"samples_per_batch": 4, "samples_per_epoch": 20, "lr": "linear"}
    assert exports.lightning(schedule, **options).lr_factors == {0: 1.0, 2: 2.0, 6: 8.0}


def test_hugging_face() -> None:
    pytest.importorskip("transformers")
    schedule = schedule_of(CASES[1])
    plan = exports.hugging_face(schedule, per_device_train_batch_size=2, lr="linear")
    assert [entry["lr_factor"] for entry in plan] == [1.0, 2.0, 8.0]
    scope: dict[str, Any] = {}
    exec(exports.hugging_face_lines(schedule, "linear", micro_batch=1, processes=2), scope)
    batch, trained = scope["batch"], 0
    assert (batch.settings.data_parallel, batch.settings.micro_batch) == (2, 1)
    assert [type(c).__name__ for c in scope["callbacks"]] == ["GNSCallback", "BatchSizeCallback"]
    assert scope["callbacks"][1].controller is batch
    for tokens, size in walked(CASES[1]):
        assert (trained, batch.batch_size, batch.lr_factor) == (tokens, size, size / 4)
        trained += size * LENGTH
        batch.update(trained)


def test_olmo_core_has_one_rule() -> None:
    schedule = schedule_of(CASES[1])
    with pytest.raises(ValueError, match="OLMo-core multiplies .* lr='linear' cannot be had"):
        exports.olmo_core(schedule, lr="linear")
    assert exports.olmo_core(schedule_of(CASES[0]), lr="linear")["batch_sizes"] == [40]


def invoke(*arguments: str, code: int = 0) -> str:
    given = ["schedule", *arguments, "--total-tokens", "6000", "--tokens-per-sample", "10"]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.output


TEXT = "0:4 200:8 1480:32"
BATCH = ("--per-device-batch", "2", "--processes", "2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("megatron",), "FACTORS = {0: 1.0, 20: 1.4142135623730951, 148: 2.8284271247461903}"),
        (("olmo-core",), "multiplies Adam's learning rate by √(new / old) by itself"),
        (("lightning", *BATCH, "--samples-per-epoch", "4"), "FACTORS = {0: 1.0, 5: 1.41421356"),
        (("huggingface", *BATCH), 'lr="sqrt", data_parallel=2, micro_batch=2'),
        (("nanogpt", *BATCH), "(5, 5, 2, 1.4142135623730951)"),
    ],
)
def test_every_export_says_how_the_learning_rate_changes(
    options: tuple[str, ...], said: str
) -> None:
    printed = invoke(TEXT, "--export", *options)
    assert said in printed and "1.414" in printed.partition("share of tokens")[2]
    found = json.loads(invoke(TEXT, "--json", "--export", *options))
    assert [stage["lr_factor"] for stage in found["stages"]] == [1.0, math.sqrt(2), math.sqrt(8)]
    assert found["lr"] == "sqrt"
    assert bool(found["export"]["lines"]) == (options[0] != "olmo-core")
    if options[0] == "olmo-core":
        other = invoke(TEXT, "--lr", "linear", "--export", *options, code=2)
        assert "lr='linear' cannot be had" in other
    else:
        assert "8.0" in invoke(TEXT, "--lr", "linear", "--export", *options)


def test_the_rule_of_a_log(tmp_path: Path) -> None:
    """A controller's decisions hold their factors: another rule would be none of that run."""
    log = tmp_path / "run.jsonl"

    def write(*factors: float) -> None:
        records = [
            {"kind": "decision", "tokens": 200 * 4**n, "old": 4 * 2**n, "new": 8 * 2**n}
            | {"lr_factor": factor}
            for n, factor in enumerate(factors)
        ]
        log.write_text("\n".join(map(json.dumps, records)))

    for rule, factor in (("sqrt", math.sqrt(2)), ("linear", 2.0), ("keep", 1.0)):
        write(factor, factor)
        assert json.loads(invoke(str(log), "--json"))["lr"] == rule
        assert json.loads(invoke(str(log), "--json", "--lr", rule))["lr"] == rule
    assert "which is not what --lr sqrt gives for 2 times" in invoke(
        str(log), "--lr", "sqrt", code=2
    )
    write(2.0, 1.5)
    assert "at 800 tokens multiplied the learning rate by 1.5, which is not what any one" in (
        invoke(str(log), code=2)
    )
    assert "--lr must be 'sqrt', 'linear', 'keep' or 'none'" in invoke(TEXT, "--lr", "x", code=2)

# SPDX-License-Identifier: Apache-2.0
"""Lines that move the learning rate in other frameworks, run in small copies of their loops."""

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_schedule
from typer.testing import CliRunner

from gnsfast.cli.app import app
from gnsfast.critical_batch import BatchSizeSchedule, Rules, ScheduledBatchSize, exports
from gnsfast.critical_batch.control import wsd

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
    exec(exports.lines("megatron", schedule_of(thresholds), rule), {})
    rates = module.OptimizerParamScheduler()
    for tokens, size in walked(thresholds):
        factor = Rules(rule).lr_factor(size / thresholds[0][1])
        assert rates.group["lr"] == pytest.approx(3e-3 * decay(tokens / TOTAL) * factor)
        rates.step(size)
    resumed = module.OptimizerParamScheduler()
    resumed.step(rates.num_steps)  # as its load_state_dict does
    assert resumed.group["lr"] == rates.group["lr"]


class Group:
    """What a learning-rate schedule of torch and torchtitan's optimizers have: groups."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 3e-3}, {"lr": 1e-3}]


class Titan:
    """The part of torchtitan's ``Trainer`` that the lines use, and what it trains."""

    def __init__(self, steps: int, shape: Any) -> None:
        self.step, self.optimizers, self.gradient_accumulation_steps = 0, [Group()], 7
        self.taken: list[Any] = []
        for self.step in range(1, steps + 1):
            self.schedule(shape((self.step - 1) / steps))
            self.train_step(None)
        self.schedule(shape(1.0))

    def schedule(self, factor: float) -> None:
        for group, lr in zip(self.optimizers[0].param_groups, (3e-3, 1e-3)):
            group["lr"] = lr * factor

    def train_step(self, data_iterator: Any) -> None:
        rates = [group["lr"] for group in self.optimizers[0].param_groups]
        self.taken.append((self.gradient_accumulation_steps, rates))


def modules(monkeypatch: pytest.MonkeyPatch, name: str, **holds: Any) -> None:
    """A module with this name that holds these things, in packages that hold nothing."""
    *above, last = name.split(".")
    for depth in range(1, len(above) + 2):
        each = ".".join([*above, last][:depth])
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    vars(sys.modules[name]).update(holds)


@pytest.mark.parametrize("thresholds", CASES)
def test_torchtitan(thresholds: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps have the schedule's sizes, and the learning rate of its own schedule times the
    factor, in every group.
    """
    modules(monkeypatch, "torchtitan.trainer", Trainer=Titan)
    schedule, scope = schedule_of(thresholds), {}
    exec(exports.lines("torchtitan", schedule, micro_batch=2, processes=2), scope)
    steps, first = walked(thresholds), thresholds[0][1]
    trainer = scope["Scheduled"](len(steps), decay)
    for n, ((passes, rates), (_, size)) in enumerate(zip(trainer.taken, steps, strict=True)):
        factor = decay(n / len(steps)) * math.sqrt(size / first)
        assert passes == size // 4 and rates == pytest.approx([3e-3 * factor, 1e-3 * factor])
    with pytest.raises(ValueError, match="a multiple of the samples of one forward pass.* is 12"):
        exports.lines("torchtitan", schedule, micro_batch=6, processes=2)


class Optimizer:
    """The part of Levanter's ``OptimizerConfig`` that sets learning rates: Muon's asks for a second
    one, of the parameters that Adam trains.
    """

    def lr_scheduler(self, num_train_steps: int, override_lr: float | None = None) -> Any:
        peak = 3e-3 if override_lr is None else override_lr
        return lambda step: peak * decay(step / num_train_steps)


def read_by_levanter(schedule: list[dict[str, int]], step: int) -> tuple[int, int]:
    """The size of this step and the samples before it, as Levanter's ``BatchSchedule`` finds them:
    each entry holds from its start to the next one's, the last one without end.
    """
    before = 0
    for entry, after in zip(schedule, [*schedule[1:], {"start": 2**63 - 1}]):
        if entry["start"] <= step < after["start"]:
            return entry["value"], before + (step - entry["start"]) * entry["value"]
        before += (after["start"] - entry["start"]) * entry["value"]
    raise ValueError(f"no entry holds at step {step}")


@pytest.mark.parametrize("rule", ["sqrt", "linear", "keep"])
@pytest.mark.parametrize("thresholds", CASES)
def test_levanter(
    thresholds: list[tuple[int, int]], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command prints, read as YAML and run: at each step, so at those beside a change too,
    the size and the samples before it are those of the thresholds, and the learning rate is
    Levanter's own at that step times the rule's factor.
    """
    numpy, yaml = pytest.importorskip("numpy"), pytest.importorskip("yaml")
    own = type("OptimizerConfig", (Optimizer,), {})
    modules(monkeypatch, "levanter.optim", OptimizerConfig=own)
    modules(monkeypatch, "jax.numpy", array=numpy.array, searchsorted=numpy.searchsorted)
    sys.modules["jax"].numpy = sys.modules["jax.numpy"]
    text = " ".join(f"{tokens}:{size}" for tokens, size in thresholds)
    printed = invoke(text, "--export", "levanter", "--lr", rule)
    config, lines = printed.split("\nlevanter\n")[1].split("\n\n# add these lines")
    config, steps = yaml.safe_load(config), walked(thresholds)
    exec("#" + lines, {})
    assert config["num_train_steps"] == len(steps)
    rate = own().lr_scheduler(len(steps))
    adams = own().lr_scheduler(len(steps), override_lr=1e-3)
    for n, (tokens, size) in enumerate(steps):
        assert read_by_levanter(config["train_batch_size"], n) == (size, tokens // LENGTH)
        factor = Rules(rule).lr_factor(size / thresholds[0][1])
        wanted = decay(n / len(steps)) * factor
        assert [rate(n), adams(n)] == pytest.approx([3e-3 * wanted, 1e-3 * wanted], rel=1e-12)


NANOGPT = Path(__file__).parents[2] / "docs" / "recipes" / "nanogpt.md"
LOOP = """
while True:
{lines}
    rates.append(lr)
    sizes.append(gradient_accumulation_steps * batch_size * ddp_world_size)
    iter_num += 1
    if iter_num > max_iters:
        break
"""


def test_the_lines_for_nanogpt() -> None:
    """Those of the page, in a copy of nanoGPT's loop: the schedule's steps, a decay in tokens."""
    [diff] = re.findall(r"## A batch that grows.*?```diff\n(.*?)```", NANOGPT.read_text(), re.S)
    settings, loop = diff.split(" ...\n")
    settings, loop = ("\n".join(re.findall(r"(?m)^\+(.*)", each)) for each in (settings, loop))
    schedule = BatchSizeSchedule.parse("0:480 5B:960", total_tokens=10e9, tokens_per_sample=1024)
    scope: dict[str, Any] = {"iter_num": 0, "batch_size": 12, "ddp_world_size": 8}
    scope |= {"decay_lr": True, "rates": [], "sizes": []}
    scope["get_lr"] = lambda it: 6e-4 * decay(it / scope["lr_decay_iters"])
    exec(settings + LOOP.format(lines=loop), scope)
    steps = [
        (s.tokens + n * s.batch_size * 1024, s) for s in schedule.stages for n in range(s.steps)
    ]
    assert scope["sizes"] == [stage.batch_size for _, stage in steps]
    assert scope["lr_decay_iters"] == exports.first_steps(schedule)
    total = exports.first_steps(schedule) * 480 * 1024
    assert scope["rates"] == pytest.approx(
        [6e-4 * decay(t / total) * math.sqrt(s.batch_size / 480) for t, s in steps]
    )


@pytest.mark.parametrize("tool", ["huggingface", "lightning"])
def test_callbacks(tool: str) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(tool, tool))
    scope: dict[str, Any] = {}
    lines = exports.lines(tool, schedule_of(CASES[1]), "linear", micro_batch=1, processes=2)
    exec(lines, scope)
    batch, trained = scope["batch"], 0
    assert (batch.settings.data_parallel, batch.settings.micro_batch) == (2, 1)
    measures = {"huggingface": "GNSCallback", "lightning": "GNSMonitor"}[tool]
    assert [type(c).__name__ for c in scope["callbacks"]] == [measures, "BatchSizeCallback"]
    assert scope["callbacks"][1].controller is batch and "=2)" in lines
    for tokens, size in walked(CASES[1]):
        assert (trained, batch.batch_size, batch.lr_factor) == (tokens, size, size / 4)
        trained += size * LENGTH
        batch.update(trained)
    for pairs in ([(0, 64), (2000, 32)], [(0, 8), (100, 12)]):
        said = f"a batch of {pairs[1][1]} samples must be a multiple of the first one"
        with pytest.raises(ValueError, match=said):
            exports.lines(tool, BatchSizeSchedule(pairs, 20_000, 10), micro_batch=4)


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


TOTAL_OF = {
    "megatron": r"--lr-decay-samples (\d+)",
    "olmo-core": r"Duration.tokens\((\d+)\)",
    "torchtitan": r"--training.steps (\d+)",
    "levanter": r"num_train_steps: (\d+)",
    "huggingface": r"max_steps=(\d+)",
    "lightning": r"the first batch size: (\d+) in all",
}
"""Where the notes of an export say at which count a decay ends: samples, tokens or steps."""


@pytest.mark.parametrize("thresholds", CASES[:2])
@pytest.mark.parametrize("tool", exports.TOOLS)
def test_a_decay_ends_with_the_last_token(tool: str, thresholds: list[tuple[int, int]]) -> None:
    """Warm-up, stable, decay (WSD) with the total that an export prints, counted as its tool does:
    after the last step the learning rate is the final one, and before it is not.
    """
    text = " ".join(f"{tokens}:{size}" for tokens, size in thresholds)
    found = json.loads(invoke(text, "--json", "--export", tool, "--per-device-batch", "4"))
    total = number(TOTAL_OF[tool], "\n".join(found["export"]["notes"]))
    of_last_step, count = 0.0, 0.0
    for tokens, size in walked(thresholds):
        of_last_step = count
        samples = tokens // LENGTH + size
        count = {"megatron": samples, "olmo-core": samples * LENGTH}.get(tool, count + 1)
        if tool in ("huggingface", "lightning"):
            count = samples / thresholds[0][1]
    shape = wsd(total, decay=total // 2, warm_up=total // 10, final=0.1)
    assert shape(count) == 0.1 and shape(of_last_step) > 0.1


def megatrons_wsd(num_steps: int, decay_steps: int, wsd_decay_steps: int) -> float:
    """The share of its peak by Megatron-LM's ``OptimizerParamScheduler``, of a linear WSD to 0.1:
    after ``lr_decay_steps`` samples the least rate, and before them a ratio that it asserts.
    """
    if num_steps > decay_steps:
        return 0.1
    assert 0 <= num_steps / decay_steps <= 1
    annealed = max(0, num_steps - (decay_steps - wsd_decay_steps))
    return 0.1 + 0.9 * (1 - annealed / wsd_decay_steps)


RAMP = [(0, 4), (1200, 8), (2400, 12)]


def test_megatrons_decay_of_samples_ends_with_both_flags() -> None:
    """``--step-batch-size-schedule`` and the older ramp, by the samples that the notes print.
    Iterations times the last batch, as Megatron-Bridge counts them (its issue 2609), do not.
    """
    schedule = schedule_of(RAMP)
    ramp, end = exports.megatron_ramp(schedule), exports.end_samples(schedule)
    said = invoke(" ".join(f"{t}:{s}" for t, s in RAMP), "--export", "megatron")
    assert f"--lr-decay-samples {end}" in said and "Megatron-Bridge" in said
    samples = rate = 0.0
    while samples < ramp.train_samples:
        rate = megatrons_wsd(int(samples), end, 100)
        samples += ramp.batch_size_at(int(samples))
    assert samples == end == ramp.train_samples and 0.1 < rate < 0.25
    assert megatrons_wsd(int(samples), end, 100) == pytest.approx(0.1)
    iterations = schedule.steps * RAMP[-1][1]
    assert megatrons_wsd(int(samples), iterations, 100) == 1.0


@pytest.mark.parametrize("thresholds", CASES)
def test_the_last_rate_of_a_loop(thresholds: list[tuple[int, int]]) -> None:
    """Of ``lr_lambda``: after the last token the final rate, times the factor of its batch."""
    batch = ScheduledBatchSize(schedule_of(thresholds), micro_batch=4)
    rate = batch.lr_lambda(wsd(TOTAL, decay=TOTAL // 2, final=0.1))
    before = 0.0
    while batch.tokens < TOTAL:
        before = rate(0) / batch.lr_factor
        batch.update(batch.tokens + batch.batch_tokens)
    assert rate(0) == 0.1 * batch.lr_factor and before > 0.1


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
        (("torchtitan", *BATCH), "STAGES = {0: (1, 1.0), 5: (2, 1.4142135623730951)"),
        (("levanter",), "jnp.array([0, 5, 21]), jnp.array([1.0, 1.4142135623730951"),
        (("lightning", *BATCH), 'lr="sqrt", data_parallel=2, micro_batch=2'),
        (("huggingface", *BATCH), 'lr="sqrt", data_parallel=2, micro_batch=2'),
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
        assert "8.0" in invoke(TEXT, "--lr", "linear", "--export", *options) or 'lr="linear"' in (
            invoke(TEXT, "--lr", "linear", "--export", *options)
        )


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

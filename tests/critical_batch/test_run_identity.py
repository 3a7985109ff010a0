# SPDX-License-Identifier: Apache-2.0
"""A factor goes with the run that it was measured in, and one that differs refuses it by name."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_runs import ScriptedRun
from test_measurement import FOUND, MeasuredRun
from torch import nn

from gnsfast.critical_batch import (
    BatchSizeController,
    CriticalBatch,
    CriticalBatchFactor,
    RunIdentity,
    TorchRun,
    measure_critical_batch,
    pooled_factor,
)

OURS = RunIdentity("of 12 elements (shapes ab)", "AdamW", "wikitext", 512)


def controller(factor: Any, **others: Any) -> BatchSizeController:
    options = {"tokens_per_sample": 512, "total_tokens": 10**7, "max_batch_size": 64} | others
    return BatchSizeController(8, factor=factor, **options)


def factor(run: RunIdentity = OURS) -> CriticalBatchFactor:
    return CriticalBatchFactor(8.0, 5.0, 11.0, "euclidean", "branches", run, (5000,))


def model_of(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


def test_the_same_run_in_other_clothes() -> None:
    """Neither conversion nor compilation nor a wrapper makes another model; a width does, and so
    does what is frozen.
    """
    plain = model_of()

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    known = RunIdentity.of(plain)
    for same in (Wrapped(model_of()), torch.compile(model_of()), model_of()):
        assert RunIdentity.of(same) == known
    frozen = model_of()
    frozen[0].requires_grad_(False)
    turned = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    for other in (model_of(6), frozen, turned):
        assert RunIdentity.of(other) != known
    adam = torch.optim.AdamW(plain.parameters())
    outer = type("AcceleratedOptimizer", (torch.optim.Optimizer,), {"__init__": lambda self: None})
    around = outer()
    around.optimizer = adam
    assert RunIdentity.of(optimizer=around).optimizer == "AdamW"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "of 13 elements (shapes cd)", "model of 12 elements .*and not of 13 elements"),
        ("optimizer", "Muon", "optimizer AdamW and not Muon"),
        ("data", "c4", "data wikitext and not c4"),
        ("tokens_per_sample", 4096, "tokens per sample 512 and not 4096"),
    ],
)
def test_each_field_is_compared(field: str, value: Any, said: str) -> None:
    other = replace(OURS, **{field: value})
    with pytest.raises(ValueError, match=f"another run, with {said}.*for_other_run"):
        factor().check_run(other)
    factor().check_run(OURS)
    factor().check_run(replace(OURS, **{field: None}))  # unknown: agrees, and is named
    assert replace(OURS, **{field: None}).unknown() == (field,)
    assert "unknown" in str(replace(OURS, **{field: None})) and "unknown" not in str(OURS)
    meant = factor().for_other_run()
    meant.check_run(other)
    assert meant.value == 8.0 and f"of another run: {OURS}" in meant.source


def test_a_controller_refuses_it() -> None:
    with pytest.raises(ValueError, match="tokens per sample 512 and not 4096"):
        controller(factor(), tokens_per_sample=4096)
    ours = controller(factor())
    ours.check_run(replace(OURS, tokens_per_sample=None))
    with pytest.raises(ValueError, match="optimizer AdamW and not SGD"):
        ours.check_run(RunIdentity(optimizer="SGD"))
    controller(factor().for_other_run(), tokens_per_sample=4096).check_run(RunIdentity("other"))
    controller(8.0).check_run(OURS)  # set by hand
    state = json.loads(json.dumps(ours.state_dict(), allow_nan=False))
    assert "run" not in state["settings"]["factor"]
    controller(factor(RunIdentity())).load_state_dict(state)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "factor.json"
    factor().save(path)
    assert CriticalBatchFactor.load(path) == factor()
    saved = json.loads(path.read_text())
    for damaged in (
        {**saved, "run": {"colour": "red"}},
        {k: saved[k] for k in saved if k != "run"},
    ):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="factor.json is damaged"):
            CriticalBatchFactor.load(path)


def test_from_a_measurement_to_its_factor(tmp_path: Path) -> None:
    """Through the folder and the result's record; any run knows its context."""
    how: dict[str, Any] = {"k": (0.5, 1, 2, 4, 8), "delta_tokens": 9000}
    found = measure_critical_batch(MeasuredRun(), folder=tmp_path / "a", **how)
    assert found.run == RunIdentity(tokens_per_sample=MeasuredRun().tokens_per_sample)
    run = MeasuredRun()
    run.identity = lambda: OURS
    found = measure_critical_batch(run, folder=tmp_path / "b", **how)
    own = replace(OURS, tokens_per_sample=run.tokens_per_sample)
    again = measure_critical_batch(ScriptedRun(), folder=tmp_path / "b", **how)
    for each in (found, again, CriticalBatch.load(tmp_path / "b")):
        assert each.run == own
        made = each.factor(despite_doubts=True)
        assert made.run == own and made.tokens == (found.tokens,)
    older = {k: v for k, v in found.record().items() if k != "run"}
    assert CriticalBatch.from_record(older).run == RunIdentity()


def test_pooled_of_one_run() -> None:
    one, two = replace(FOUND, run=OURS), replace(FOUND, run=replace(OURS, model="of 7 elements"))
    assert pooled_factor([one, replace(one, tokens=9000)]).tokens == (5000, 9000)
    with pytest.raises(ValueError, match="of different runs, one with model of 12 elements"):
        pooled_factor([one, two])


def test_a_torch_run_knows_itself() -> None:
    class Noise:
        name = "noise"

        def draw(self, n: int) -> Any:
            return torch.randn(n, 3)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = model_of()
    run = TorchRun(
        *(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).square().mean(), Noise()),
        batch_size=4, tokens_per_sample=7,
    )  # fmt: skip
    assert run.identity() == RunIdentity(RunIdentity.of(model).model, "SGD", "noise")
    assert {*asdict(run.identity())} == {"model", "optimizer", "data", "tokens_per_sample"}

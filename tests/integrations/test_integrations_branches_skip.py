# SPDX-License-Identifier: Apache-2.0
"""``TrainerRun.skip``: later data at the same weights, for repeated measurements."""

from pathlib import Path
from typing import Any

import pytest
from test_integrations_branches import base, masked, run_of
from torch import Tensor
from trainer_cases import Model, T, same, samples, weights

from gnsfast.critical_batch.branches import averaged, measure_critical_batch, measure_repeatedly
from gnsfast.integrations.transformers_branches import TrainerRun

STEP, LAST = 4 * T, T  # an epoch has seven steps, of which the last one is a single sample


def still(folder: Path, seeded: bool = True, **options: Any) -> TrainerRun:
    """A run whose weights stay as they are, so that the loss of a step tells its data."""
    options |= dict(learning_rate=0.0, weight_decay=0.0)
    sampler = {"use_seedable_sampler": seeded}
    return run_of(folder, model=Model(0.0), accelerator_config=sampler, **options)


def losses(run: TrainerRun, tokens: int) -> list[float]:
    return [step.loss for step in base(run, tokens)]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("before", [0, 2])
def test_within_an_epoch(tmp_path: Path, before: int, seeded: bool) -> None:
    """Whole steps are skipped, also where the run has not drawn the epoch's order yet."""
    truth = losses(still(tmp_path, seeded), 6 * STEP + LAST)
    run = still(tmp_path, seeded)
    if before:
        base(run, before * STEP)
    run.skip(STEP + 1)
    assert losses(run, STEP) == truth[before + 2 : before + 3]
    run.skip(1)
    assert losses(run, LAST) == truth[before + 4 : before + 5]


def test_into_later_epochs(tmp_path: Path) -> None:
    truth = losses(still(tmp_path), 12 * STEP + 2 * LAST)
    for skipped in (6 * STEP + LAST, 6 * STEP + LAST + 1, 10 * STEP):
        run = still(tmp_path)
        losses(run, STEP)
        run.skip(skipped)
        assert run.tokens == STEP
        first = {6 * STEP + LAST: 8, 6 * STEP + LAST + 1: 9, 10 * STEP: 12}[skipped]
        assert losses(run, STEP) == truth[first : first + 1]


def test_nothing_is_loaded(tmp_path: Path) -> None:
    class Counted(list[dict[str, Tensor]]):
        loaded = 0

        def __getitem__(self, k: Any) -> Any:
            self.loaded += 1
            return super().__getitem__(k)

    data = Counted(samples(25))
    run = still(tmp_path, data=data)
    losses(run, STEP)
    loaded = data.loaded
    run.skip(4 * STEP)
    assert data.loaded == loaded + 2  # the micro-batch that comes next


def test_learning_rates_and_tokens(tmp_path: Path) -> None:
    """Those of the run that skipped nothing; so many are left until its end."""
    rates: list[list[float]] = []
    for skipped in (0, 6 * STEP + LAST):  # none or all of an epoch
        run = run_of(tmp_path)
        base(run, STEP)
        if skipped:
            run.skip(skipped)
        steps = run.train(run._tokens_at_the_end() - run.tokens, batch_size=4, lr_factor=1.0)
        groups = run.trainer.optimizer.param_groups
        rates.append([float(groups[0]["lr"]) for _ in zip(range(5), steps)])
    assert rates[0] == rates[1] and len({*rates[0]}) == 5


@pytest.mark.parametrize("collator", [None, masked])
def test_saved_and_restored(tmp_path: Path, collator: Any) -> None:
    """In another process too: nothing else tells it what was skipped."""
    options = {} if collator is None else {"data_collator": collator}
    run = run_of(tmp_path, **options)
    base(run, STEP)
    run.skip(7 * STEP)
    run.save(tmp_path)
    truth, after = base(run, 3 * STEP), weights(run.trainer)
    other = run_of(tmp_path, **options)
    other.restore(tmp_path)
    assert other.tokens == STEP and base(other, 3 * STEP) == truth
    assert same(weights(other.trainer), after) and other.tokens == run.tokens
    assert other.trainer.state.global_step == run.trainer.state.global_step == 4


def test_repeats(tmp_path: Path) -> None:
    how: dict[str, Any] = {"k": (1, 2), "delta_tokens": 6 * STEP, "tolerance": 9.0}
    run = run_of(tmp_path)
    base(run, STEP)
    found = measure_repeatedly(run, folder=tmp_path / "a", repeats=2, **how)
    assert run.tokens == STEP and base(run, STEP) == base(run_of(tmp_path), 2 * STEP)[1:]
    truth = run_of(tmp_path)
    base(truth, STEP)
    first = measure_critical_batch(truth, folder=tmp_path / "b", **how)
    truth.skip(6 * STEP + 2 * STEP)
    second = measure_critical_batch(truth, folder=tmp_path / "c", noise_scale=False, **how)
    assert found == averaged([first, second])
    assert first.branches != second.branches

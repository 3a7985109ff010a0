# SPDX-License-Identifier: Apache-2.0
"""``TorchRun``: a branch point and the run that was never branched are the same bits."""

import random
from pathlib import Path
from typing import Any

import branch_runs
import numpy
import pytest
import torch
from branch_runs import small_run

import gnsfast
from gnsfast.critical_batch.branches import TorchRun, measure_critical_batch


def everything(run: TorchRun) -> dict[str, Any]:
    """What training on depends on, as values that compare."""
    flat = {f"model.{k}": v for k, v in run.model.state_dict().items()}
    flat |= {f"buffer.{k}": v for k, v in run.model.named_buffers()}
    for index, state in run.optimizer.state_dict()["state"].items():
        flat |= {f"optimizer.{index}.{k}": v for k, v in state.items()}
    plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in flat.items()}
    plain["groups"] = run.optimizer.state_dict()["param_groups"]
    plain["grads"] = [None if p.grad is None else p.grad.tolist() for p in run.model.parameters()]
    plain["modes"] = [m.training for m in run.model.modules()]
    plain["random"] = random.getstate(), torch.get_rng_state().tolist()
    plain["numpy"] = numpy.random.get_state()[1].tolist()
    plain["run"] = run.tokens, run.batch_size, dict(run.stream.state_dict())
    return plain


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_branch_point_and_unbranched_run_are_one(optimizer: Any, tmp_path: Path) -> None:
    """Restored after branches of another batch size, and in a run made anew."""
    run = small_run(optimizer=optimizer)
    list(run.train(400))
    run.save(tmp_path)
    at_checkpoint = everything(run)
    unbranched = list(run.train(800))
    expected = everything(run)

    run.restore(tmp_path)
    assert everything(run) == at_checkpoint
    list(run.train(640, batch_size=32, lr_factor=2.0))
    assert everything(run) != expected
    run.restore(tmp_path)
    assert list(run.train(800, batch_size=8, lr_factor=1.0)) == unbranched
    assert everything(run) == expected

    other = small_run(seed=7, optimizer=optimizer)
    numpy.random.seed(7)
    other.restore(tmp_path)
    assert list(other.train(800)) == unbranched
    assert everything(other) == expected


def test_gradients_that_no_optimizer_takes() -> None:
    """They count in ``clip``, so each step has those of its own batch."""
    run = small_run()
    run.optimizer.param_groups[0]["params"].pop()
    run.step()
    assert not any(everything(run)["grads"])


def test_step_and_train_are_one(tmp_path: Path) -> None:
    steps = [small_run().step()]
    assert steps == list(small_run().train(80))
    assert steps[0].tokens == 80
    with pytest.raises(ValueError, match="batch_size"):
        list(small_run().train(80, batch_size=0))


def test_buffers_beside_the_state_dict(tmp_path: Path) -> None:
    run = small_run()
    run.model.register_buffer("seen", torch.zeros(()), persistent=False)
    run.model.register_forward_hook(lambda m, *_: m.seen.add_(1) and None)
    run.step()
    run.save(tmp_path)
    run.step()
    assert run.model.seen == 6
    run.restore(tmp_path)
    assert run.model.seen == 3


def test_what_a_step_is() -> None:
    """Against the same step by hand: micro-batches of 3, 3 and 2, clipping, the schedule's rate."""
    by_hand, losses = small_run(), []
    model, optimizer = by_hand.model, by_hand.optimizer
    for tokens in (0, 80, 160):
        parts = []
        for n in (3, 3, 2):
            parts.append(branch_runs.loss_fn(model, by_hand.stream.draw(n)) * n / 8)
            parts[-1].backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 ** (tokens / 2000)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts).item())
    run = small_run()
    assert [run.step().loss for _ in range(3)] == pytest.approx(losses, rel=1e-6)
    for a, b in zip(run.model.parameters(), model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def rates(run: TorchRun, **how: Any) -> list[tuple[float, float]]:
    """Learning rate and beta2 of three steps, as the optimizer meets them."""
    met: list[tuple[float, float]] = []
    hook = run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: met.extend((g["lr"], g["betas"][1]) for g in optimizer.param_groups)
    )
    list(run.train(3 * 10 * how.get("batch_size", 8), **how))
    hook.remove()
    return met


def test_branches_go_on_with_the_schedule() -> None:
    met = rates(small_run(), batch_size=16, lr_factor=1.5)
    expected = [0.015 * 0.5 ** (tokens / 2000) for tokens in (0, 160, 320)]
    assert [lr for lr, _ in met] == pytest.approx(expected)
    assert [beta2 for _, beta2 in met] == [0.999] * 3


def test_a_schedule_of_the_users_own_is_left_alone() -> None:
    run = small_run(lr=None)
    run.optimizer.param_groups[0]["initial_lr"] = 1.0  # as torch's schedulers leave it
    assert [lr for lr, _ in rates(run, lr_factor=2.0)] == [0.02] * 3
    assert run.optimizer.param_groups[0]["lr"] == 0.01
    run.optimizer.param_groups[0]["lr"] = 0.005
    assert [lr for lr, _ in rates(run)] == [0.005] * 3


def test_a_learning_rate_from_outside_is_no_part_of_a_schedule(tmp_path: Path) -> None:
    """A growing batch's factor would be gone at the next step."""
    run = small_run()
    run.step()
    run.save(tmp_path)
    run.optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(ValueError, match="has changed, but TorchRun.lr=...."):
        run.step()
    run.restore(tmp_path)
    run.step()


def test_learning_rate_as_a_tensor() -> None:
    run = small_run()
    run.optimizer.param_groups[0]["lr"] = lr = torch.tensor(0.01)
    met = rates(run, lr_factor=2.0)
    assert float(met[1][0]) == pytest.approx(0.02 * 0.5 ** (80 / 2000))
    assert run.optimizer.param_groups[0]["lr"] is lr


def test_beta2_in_tokens() -> None:
    run = small_run(betas="half_life")
    assert [b for _, b in rates(run, batch_size=32)] == pytest.approx([0.999**4] * 3)
    assert [b for _, b in rates(run)] == [0.999] * 3


def test_a_rule_that_cannot_be_is_refused_before_a_branch_starts(tmp_path: Path) -> None:
    """1 - 16 (1 - 0.9) is negative: neither a checkpoint nor a branch is made."""
    with pytest.raises(ValueError, match="betas='sde' does not allow a batch 16 times as large"):
        measure_critical_batch(
            small_run(betas="sde"), folder=tmp_path / "cbs", k=(0.5, 1, 16), delta_tokens=10_000
        )
    assert not (tmp_path / "cbs").exists()


def test_weight_decay_by_its_timescale() -> None:
    """At the learning rate that the branch has, whoever chose it."""
    run, met = small_run(weight_decay="timescale"), []
    run.optimizer.register_step_pre_hook(lambda o, *_: met.append(o.param_groups[0].copy()))
    list(run.train(320, batch_size=32, lr_factor=3.0))
    assert met[0]["weight_decay"] == pytest.approx(0.01 * 4 / 3)
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.01


class Averages(torch.nn.Module):
    """Its buffer moves in each forward pass, or is ``replaced`` by another tensor."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.replaced = replaced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        if self.replaced:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return x + mean


def test_noise_scale_leaves_no_trace() -> None:
    run = small_run()
    list(run.train(400))
    run.model.append(Averages(replaced=False))
    run.model[0].eval()
    run.model[0].weight.grad = torch.ones(16, 6)
    before = everything(run)
    found = run.noise_scale(batches=5)
    assert everything(run) == before
    assert found is not None and (found.updates, found.samples) == (5, 40)
    assert found.adam is not None and found.adam.updates == 5
    assert run.noise_scale_reason == ""


def test_noise_scale_and_evaluation_put_back_buffers_that_are_replaced() -> None:
    run = small_run(evaluate=lambda model: float(model(torch.ones(2, 6)).mean()))
    run.model.append(Averages(replaced=True))
    list(run.train(400))
    kept, before = run.model[-1].mean, everything(run)
    assert run.noise_scale(batches=2) is not None and run.evaluate is not None
    run.evaluate()
    assert everything(run) == before and run.model[-1].mean is kept


def test_noise_scale_is_that_of_the_batches() -> None:
    run = small_run()
    list(run.train(400))
    found, again = run.noise_scale(batches=5), run.noise_scale(batches=5)
    assert found == again
    gns = gnsfast.GradientNoiseScale(run.model)
    for _ in range(5):
        with gns.update():
            for _ in range(4):  # the run itself takes 3, 3 and 2 samples
                with gns.microbatch(2, scale=2 / 8):
                    (branch_runs.loss_fn(run.model, run.stream.draw(2)) * 2 / 8).backward()
        run.optimizer.zero_grad()
    expected = gns.compute()
    assert found.noise_scale == pytest.approx(expected.noise_scale, rel=1e-6)
    assert found.trace == pytest.approx(expected.trace, rel=1e-6)


def test_noise_scales_that_there_are_not() -> None:
    plain = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    stream, sizes = branch_runs.Stream(), {"batch_size": 8, "tokens_per_sample": 10}
    run = TorchRun(plain, optimizer, branch_runs.loss_fn, stream, **sizes)
    assert run.noise_scale(batches=2) is not None and run.evaluate is None
    plain.requires_grad_(False)
    assert run.noise_scale() is None and "no trainable parameter" in run.noise_scale_reason


def matrices(parameters: Any, lr: float) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=lr)


@pytest.mark.parametrize(
    "optimizer, steps, fit",
    [
        (torch.optim.AdamW, 5, {"adam", "sign"}),
        (torch.optim.AdamW, 0, {"sign"}),
        (torch.optim.SGD, 5, {"sign"}),
        (matrices, 5, {"spectral"}),
    ],
)
def test_noise_scales_that_fit_the_optimizer(optimizer: Any, steps: int, fit: set[str]) -> None:
    run = small_run(optimizer=optimizer)
    list(run.train(80 * steps))
    before = everything(run)
    found = run.noise_scale(batches=4)
    assert everything(run) == before and set(found.others) == fit
    assert all(scale.lower < scale.noise_scale for scale in found.others.values())
    own = {"optimizer": run.optimizer} if "adam" in fit else {}
    gns = gnsfast.GradientNoiseScale(run.model, window=4, metric=[*fit], **own)
    for _ in range(4):
        with gns.update():
            for _ in range(4):  # the run itself takes 3, 3 and 2 samples
                with gns.microbatch(2, scale=2 / 8):
                    (branch_runs.loss_fn(run.model, run.stream.draw(2)) * 2 / 8).backward()
        run.model.zero_grad()
    for metric, scale in gns.compute().others.items():
        assert found.under(metric).noise_scale == pytest.approx(scale.noise_scale, rel=1e-6)


def test_noise_scales_of_a_convolution() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream, sizes = branch_runs.Stream(), {"batch_size": 8, "tokens_per_sample": 10}
    run = TorchRun(model, optimizer, lambda m, x: m(x[:, None]).square().mean(), stream, **sizes)
    run.step()
    found = run.noise_scale(batches=3)
    assert found.updates == 3 and set(found.others) == {"adam", "sign"}


def test_gns_of_the_run_is_saved_with_it(tmp_path: Path) -> None:
    run = small_run()
    run.gns = gnsfast.GradientNoiseScale(run.model)
    list(run.train(400))
    run.save(tmp_path)
    expected = [list(run.train(400)), run.gns.compute()]
    run.restore(tmp_path)
    run.noise_scale(batches=3)
    assert run.gns.compute().updates == 5
    assert [list(run.train(400)), run.gns.compute()] == expected
    with pytest.raises(ValueError, match="with gns"):
        small_run().restore(tmp_path)


def test_evaluation_leaves_no_trace() -> None:
    def evaluate(model: torch.nn.Module) -> float:
        assert not model.training and not torch.is_grad_enabled()
        return float(model(torch.randn(4, 6)).sum() + random.random())

    run = small_run(evaluate=evaluate)
    before = everything(run)
    assert run.evaluate() == run.evaluate()
    assert everything(run) == before


def test_evaluation_is_not_rounded() -> None:
    run = small_run(evaluate=lambda model: 0.1)
    assert run.evaluate is not None and run.evaluate() == 0.1


def test_checkpoints_load_without_pickles(tmp_path: Path) -> None:
    """And only into a run that fits."""
    small_run().save(tmp_path)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert set(state) > {"model", "optimizer", "random", "stream", "tokens"}
    with pytest.raises(
        ValueError, match="tokens_per_sample=10, but this run has tokens_per_sample=20"
    ):
        small_run(tokens_per_sample=20).restore(tmp_path)
    grown = small_run()
    grown.batch_size = 16
    grown.save(tmp_path)
    run = small_run()
    run.restore(tmp_path)
    assert run.batch_size == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"tokens_per_sample": -1}, "tokens_per_sample"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"tokens": -5}, "tokens"),
        ({"betas": "samples"}, "'half_life' or 'sde'"),
        ({"betas": "sde", "optimizer": torch.optim.SGD}, "SGD has no betas to change"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_run(**options)

# SPDX-License-Identifier: Apache-2.0
"""A run of several processes and its branches: bit for bit, one writer, all take part."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import branch_runs
import pytest
import torch
import torch.distributed as dist
from branch_runs import Stream, loss_fn, sharded_run, small_run
from processes import each, spawn
from torch.nn.parallel import DistributedDataParallel

from gnsfast.critical_batch.branches import TorchRun, measure_critical_batch

pytestmark = pytest.mark.dist

GRID = {"k": (1, 2, 4), "delta_tokens": 960, "tolerance": 0.5}


def everything(run: TorchRun) -> dict[str, Any]:
    """What training on depends on: this process's part, as values that compare."""
    state = run.optimizer.state_dict()
    flat = dict(run.model.state_dict())
    flat |= {f"{i}.{k}": v for i, own in state["state"].items() for k, v in own.items()}
    found: dict[str, Any] = {
        name: getattr(t, "_local_tensor", t).tolist() for name, t in flat.items()
    }
    found["rest"] = state["param_groups"], run.tokens, run.stream.state_dict()
    found["random"] = torch.get_rng_state().tolist()
    return found


def back_at_the_checkpoint(rank: int, path: str, wrap: str, steps: int) -> None:
    folder = Path(path) / f"{wrap}-{steps}"
    folder.mkdir(exist_ok=True)
    run = sharded_run(wrap)
    list(run.train(80 * steps))
    run.save(folder)
    at_checkpoint = everything(run)
    own = torch.load(folder / f"process-{rank}.pt")
    assert {*own["model"].values()} == {None} or rank == 0 or wrap == "fsdp"  # written once
    unbranched = list(run.train(480))
    end = everything(run)
    list(run.train(320, batch_size=16, lr_factor=1.5))
    run.restore(folder)
    assert everything(run) == at_checkpoint
    other = sharded_run(wrap)
    torch.manual_seed(7)
    other.step()
    other.restore(folder)
    assert everything(other) == at_checkpoint
    assert list(other.train(480)) == unbranched and everything(other) == end


def like_one_process(rank: int) -> None:
    """Without dropout, the losses are those of one process with the same samples."""
    run = sharded_run("ddp")
    run.model.eval()
    found = [step.loss for step in run.train(480)]
    model = branch_runs.small_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    expected = []
    stream = branch_runs.SampleStream(data)
    for tokens in range(0, 480, 80):
        x = stream.draw(8)
        loss = loss_fn(model, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * branch_runs.halving(tokens)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)


def test_state(tmp_path: Path) -> None:
    cases = [(str(tmp_path), wrap, steps) for wrap in ("ddp", "fsdp") for steps in (0, 3)]
    spawn(each, 2, ([back_at_the_checkpoint], *cases))


def measured(rank: int, path: str) -> None:
    run = sharded_run("ddp")
    list(run.train(400))
    before = everything(run)
    found = measure_critical_batch(run, folder=Path(path) / "cbs", **GRID)
    assert everything(run) == before
    assert [b.batch_size for b in found.branches] == [8, 16, 32] and not found.missing
    assert found.noise_scale is not None and found.adam is not None
    lines = (Path(path) / "cbs" / "branch-1x" / "steps.jsonl").read_text().splitlines()
    unbranched = [step.loss for step in run.train(960)]
    assert [json.loads(line)["loss"] for line in lines] == unbranched
    losses: list[Any] = [None, None]
    dist.all_gather_object(losses, [b.loss for b in found.branches])
    assert losses[0] == losses[1]


def both_fail(rank: int, path: str) -> None:
    """Then the measurement ends, on every process. The next call trains that branch."""
    folder = Path(path) / "failed"
    for _ in range(2):
        run = sharded_run("ddp", lr=lambda tokens: 1 / (tokens < 480))
        with pytest.raises(ZeroDivisionError):
            measure_critical_batch(run, folder=folder, **GRID)
        dist.barrier()
        assert not list((folder / "branch-1x").iterdir())
    run = sharded_run("ddp", lr=lambda tokens: 1.0)
    assert not measure_critical_batch(run, folder=folder, **GRID).missing


def refused(rank: int, path: str) -> None:
    """On every process, in the same words."""
    folder = Path(path) / "refused"
    with pytest.raises(ValueError, match="k = 0.125 times the .* gives 1 samples.*multiple of 2"):
        measure_critical_batch(sharded_run("ddp"), folder=folder, **GRID | {"k": (1, 0.125)})
    with pytest.raises(ValueError, match="train its branches together: leave out executor"):
        options = GRID | {"executor": ThreadPoolExecutor(1), "make_run": small_run}
        measure_critical_batch(sharded_run("ddp"), folder=folder, **options)
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of the 2 processes"):
        sharded_run("ddp", batch_size=3).step()


def not_shared(rank: int) -> None:
    with pytest.raises(ValueError, match="wrap the model in DistributedDataParallel"):
        sharded_run("")
    model = DistributedDataParallel(branch_runs.small_model())
    optimizer = torch.optim.SGD(model.parameters())
    how = {"batch_size": 8, "tokens_per_sample": 10}
    with pytest.raises(ValueError, match="returned all 8 samples in each of 2 processes"):
        TorchRun(model, optimizer, loss_fn, Stream(), **how).step()


def test_measured(tmp_path: Path) -> None:
    spawn(each, 2, ([measured, both_fail, refused], (str(tmp_path),)))


def test_runs() -> None:
    spawn(each, 2, ([like_one_process, not_shared],))

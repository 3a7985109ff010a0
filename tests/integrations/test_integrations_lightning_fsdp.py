# SPDX-License-Identifier: Apache-2.0
"""Lightning under FSDP 2 logs the noise scale of one process, and resumes bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from noise_cases import ALWAYS
from oracle import loop_sqnorms
from processes import as_launched, each, spawn
from test_integrations_lightning import UPDATES, N, Shared, Tiny, by_hand, data, fit
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import gnsfast
from gnsfast.integrations.lightning import GNSMonitor, _refuse


class Sharded(Shared):
    def __init__(self) -> None:
        super().__init__()

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):  # Lightning calls it again
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        fully_shard(self.model[0], mesh=mesh)  # type: ignore[operator]
        fully_shard(self.model, mesh=mesh)


class AtRest(Sharded):
    """Its weights stay as they are."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(2, 1, process_group_backend="gloo")


def run(monitor: GNSMonitor, folder: str, module: Tiny, **options: Any) -> pl.Trainer:
    # With the id of a run Lightning starts no processes of its own.
    more = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a test"}
    as_launched(torch.distributed.get_rank(), **more)
    options = {"devices": 2, "strategy": strategy(), **options}
    return fit(monitor, Path(folder), module, **options)


def whole_run(rank: int, folder: str) -> None:
    """Accumulation and clipping; what is saved in the middle continues with the same bits."""
    whole, resumed = GNSMonitor(**ALWAYS, window=7), GNSMonitor(**ALWAYS, window=7)
    every = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": UPDATES - 1, "log_every_n_steps": 1}
    saving: dict[str, Any] = {"callbacks": [every], "enable_checkpointing": True}
    trainer = run(whole, folder, Sharded(), **options, **saving)
    run(resumed, folder, Sharded(), ckpt=f"{folder}/step=4.ckpt", **options)
    found = whole.compute()
    assert float(trainer.logged_metrics["gns/trace"]) == pytest.approx(found.trace, rel=1e-6)
    assert whole.gns is not None and resumed.gns is not None
    ours, theirs = resumed.gns.state_dict(), whole.gns.state_dict()
    assert ours["measured"] == theirs["measured"] == UPDATES - 1
    assert torch.equal(ours["ring"], theirs["ring"])
    if rank == 0:
        torch.save([found.trace, found.grad_sqnorm], f"{folder}/found.pt")


def single_samples(rank: int, folder: str) -> None:
    """tr Σ + |G|² is the mean of the squared norms, without bias."""
    monitor = GNSMonitor(**ALWAYS)
    run(monitor, folder, AtRest(), max_steps=1)
    batch = [torch.cat(tensors) for tensors in zip(*data(4 * UPDATES)[:4])]

    def loss(model: nn.Module, one: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(one[0]), one[1], reduction="sum")

    sqnorms = loop_sqnorms(Tiny().model, loss, batch, 4 * N)
    mean = torch.stack([*sqnorms.values()]).sum(0).mean()
    found = monitor.compute()
    assert found.trace + found.grad_sqnorm == pytest.approx(float(mean), rel=1e-5)


def split_by_hand(rank: int, folder: str) -> None:
    monitor = GNSMonitor(**ALWAYS)
    monitor.gns = gnsfast.GradientNoiseScale(Tiny())
    batch = {"position_ids": (torch.arange(8) + 8 * rank).expand(N, 8)}
    trainer = SimpleNamespace(accumulate_grad_batches=1, current_epoch=0, optimizers=[None])
    module = Tiny()
    module.optimizer_zero_grad = lambda *given: None  # type: ignore[method-assign]
    with pytest.raises(gnsfast.ObservationError, match="parts of the same samples"):
        monitor.on_train_batch_start(trainer, module, batch, 0)


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    spawn(each, args=((whole_run, single_samples, split_by_hand), (str(tmp_path),)), method="fork")
    truth = by_hand(data(4 * UPDATES)[: 4 * (UPDATES - 1)], 4, window=7)
    found = torch.load(tmp_path / "found.pt")
    assert found == pytest.approx([truth.trace, truth.grad_sqnorm], rel=1e-5)


def test_first_version() -> None:
    """Lightning itself has it on GPUs alone."""
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy(), callbacks=[], optimizers=[])
    with pytest.raises(NotImplementedError, match=r"FSDPStrategy.*ModelParallelStrategy\(data_par"):
        _refuse(trainer, Tiny())

# SPDX-License-Identifier: Apache-2.0
"""A batch of Lightning's names the largest samples, against a loop over single ones."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from noise_cases import ALWAYS
from test_integrations_lightning import UPDATES, Loader, N, Tiny, data, fit
from torch import Tensor

from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.trackers import JSONLTracker

KEPT = 2


class Frozen(Tiny):
    """Its weights stay what they are. Its batch is a list, or has keys."""

    def __init__(self, keys: bool = True, processes: int = 1) -> None:
        super().__init__()
        self.keys, self.processes = keys, processes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (batch["x"], batch["y"]) if self.keys else batch[:2]
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Loader:
        found: list[Any] = []
        for k, (x, y) in enumerate(batches(self.processes)):
            names = [f"{k} {b}" for b in range(len(x))]
            found.append({"x": x, "y": y, "id": names} if self.keys else [x, y, names])
        return Loader(found[self.trainer.global_rank :: self.processes])


def batches(processes: int) -> list[list[Tensor]]:
    return data(2 * UPDATES * processes + 1)[:-1]


def check(monitor: GNSMonitor, processes: int, kept: int) -> None:
    model, truth, size = Tiny().model, [], 2 * processes
    for update in range(UPDATES):
        sqnorms = {}
        for k, (x, y) in enumerate(batches(processes)[update * size : (update + 1) * size]):
            for b in range(len(x)):
                loss = F.cross_entropy(model(x[b : b + 1]), y[b : b + 1]) / len(x)
                grads = torch.autograd.grad(loss, [*model.parameters()])
                sqnorms[f"{update * size + k} {b}"] = sum(float(g.square().sum()) for g in grads)
        shares = [(s / sum(sqnorms.values()), name, update) for name, s in sqnorms.items()]
        truth += sorted(shares, reverse=True)[:kept]
    assert monitor.gns is not None
    found = monitor.gns.largest()
    for one, (share, name, update) in zip(found, sorted(truth, reverse=True), strict=True):
        assert (one.id, one.update) == (name, update)
        assert one.share == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("ids", ["id", 2, lambda batch: batch["id"]], ids=["key", "place", "own"])
def test_a_batch_names_its_samples(ids: Any, tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    monitor = GNSMonitor(**ALWAYS, keep_largest=KEPT, ids=ids, tracker=tracker)
    fit(monitor, tmp_path, Frozen(keys=ids != 2), log_every_n_steps=UPDATES // 2)
    check(monitor, 1, KEPT)
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    records = [each for each in lines if "kind" in each]
    assert [each["step"] for each in records] == [UPDATES // 2, UPDATES]
    later = {sample["update"] >= UPDATES // 2 for sample in records[1]["samples"]}
    assert later == {True} and len(records[0]["samples"]) == KEPT


def test_a_resumed_run_lists_the_same(tmp_path: Path) -> None:
    every = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    whole, resumed = (GNSMonitor(**ALWAYS, keep_largest=KEPT, ids="id", window=7) for _ in range(2))
    fit(whole, tmp_path, Frozen(), callbacks=[every], enable_checkpointing=True)
    fit(resumed, tmp_path, Frozen(), ckpt=str(tmp_path / "step=4.ckpt"))
    assert whole.gns is not None and resumed.gns is not None
    assert resumed.gns.largest() == whole.gns.largest()
    assert len(whole.gns.largest()) == 7 * KEPT


@pytest.mark.parametrize(
    "ids, keys, said",
    [
        ("name", True, "the batch, a dict of x, y, id, has no such entry"),
        ("id", False, "the batch, a list, has no such entry"),
        (3, False, "the batch, a list, has no such entry"),
    ],
)
def test_a_batch_without_names(ids: Any, keys: bool, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        fit(GNSMonitor(**ALWAYS, keep_largest=1, ids=ids), tmp_path, Frozen(keys))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"GNSMonitor\(keep_largest=16\) keeps"):
        GNSMonitor(**ALWAYS, ids="id")
    with pytest.raises(ValueError, match="the batch, a Tensor, has no such entry"):
        GNSMonitor(**ALWAYS, keep_largest=1, ids=0)._ids_of(torch.zeros(4, 2))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    """Each lists the samples of both, and so does the checkpoint that one of them writes."""
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    monitor = GNSMonitor(**ALWAYS, keep_largest=2 * N, ids="id", tracker=tracker)
    every = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    options = dict(devices=2, strategy="ddp_fork", callbacks=[Checked(), every])
    options |= dict(max_steps=UPDATES, enable_checkpointing=True)
    fit(monitor, tmp_path, Frozen(processes=2), **options)
    assert (tmp_path / "checked 0").exists() and (tmp_path / "checked 1").exists()
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["callbacks"]["GNSMonitor"]
    samples = [len(own) for _, _, own in saved["means"]["largest"]["updates"]]
    assert samples == [4 * N] * 4


class Checked(pl.Callback):
    """In the processes that train."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        [monitor] = [c for c in trainer.callbacks if isinstance(c, GNSMonitor)]
        check(monitor, 2, 4 * N)
        Path(trainer.default_root_dir, f"checked {trainer.global_rank}").touch()

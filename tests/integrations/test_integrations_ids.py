# SPDX-License-Identifier: Apache-2.0
"""A column of a Trainer's data set names the largest samples, against a loop over single ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from noise_cases import ALWAYS
from processes import as_launched, spawn
from test_integrations_packed import Bytes, Flattening
from test_integrations_transformers import Plain, samples, trainer_of
from torch import Tensor

from gnsfast.estimator import LargestSample
from gnsfast.integrations.trackers import JSONLTracker
from gnsfast.integrations.transformers import GNSCallback

N, STEPS, KEPT = 4, 3, 2
Named = dict[str, Any]


def named(count: int) -> list[Named]:
    """With a name that no tensor holds, and a column that nobody asks for."""
    return [{**s, "id": f"file {k}", "text": "..."} for k, s in enumerate(samples(count))]


def frozen(model: Any, data: Any, folder: Path, *callbacks: Any, **options: Any) -> hf.Trainer:
    """Its weights stay what they are."""
    same = dict(learning_rate=0.0, max_steps=STEPS, logging_steps=1)
    return trainer_of(model, data, folder, *callbacks, **same | options)


def check(found: list[LargestSample], data: list[Named], size: int, kept: int) -> None:
    """The ``kept`` largest of each update of ``size`` samples, in micro-batches of ``N``."""
    model, truth = Plain(), []
    for update in range(STEPS):
        sqnorms = {}
        for start in range(update * size, (update + 1) * size, N):
            batch = data[start : start + N]
            tokens = sum(int((s["labels"] != -100).sum()) for s in batch)
            for sample in batch:
                logits = model(sample["input_ids"][None])["logits"][0]
                loss = F.cross_entropy(logits, sample["labels"], reduction="sum") / tokens
                grads = torch.autograd.grad(loss, [*model.parameters()])
                sqnorms[sample["id"]] = sum(float(g.square().sum()) for g in grads)
        shares = [(s / sum(sqnorms.values()), name, update) for name, s in sqnorms.items()]
        truth += sorted(shares, reverse=True)[:kept]
    for one, (share, name, update) in zip(found, sorted(truth, reverse=True), strict=True):
        assert (one.id, one.update) == (name, update)
        assert one.share == pytest.approx(share, rel=1e-4)


def test_a_model_that_takes_nothing_else(tmp_path: Path) -> None:
    """In training, and in an evaluation on the way and after it. The log has each sample once."""
    data, tracker = named(2 * STEPS * N), JSONLTracker(tmp_path / "run.jsonl")
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id", tracker=tracker)
    trainer = frozen(Plain(), data, tmp_path, callback, eval_strategy="steps", eval_steps=1)
    trainer.train()
    trainer.evaluate()
    check(callback.gns.largest(), data, 2 * N, KEPT)
    lines = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    records = [each for each in lines if "kind" in each]
    assert [each["step"] for each in records] == [1, 2, 3]
    listed = [(s["id"], s["update"]) for each in records for s in each["samples"]]
    assert [update for _, update in listed] == [0, 0, 1, 1, 2, 2]
    assert {*listed} == {(one.id, one.update) for one in callback.gns.largest()}
    assert [line["gns/largest"] for line in lines if "kind" not in line] == [
        pytest.approx(each["samples"][0]["share"]) for each in records
    ]


def test_numbers_become_a_tensor(tmp_path: Path) -> None:
    """Which Accelerate can send from one process to others."""
    data = [{**s, "id": k} for k, s in enumerate(samples(2 * STEPS * N))]
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id")
    trainer = frozen(Plain(), data, tmp_path, callback)
    trainer.train()
    check(callback.gns.largest(), data, 2 * N, KEPT)
    [first, *_] = trainer.get_train_dataloader()
    assert torch.equal(first["id"], torch.arange(N)) and "text" not in first


def test_a_resumed_run_lists_the_same(tmp_path: Path) -> None:
    data, found, lines = named(2 * STEPS * N), [], []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        log = tmp_path / f"{resume is None}.jsonl"
        callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id", tracker=JSONLTracker(log))
        saved = dict(save_strategy="steps", save_steps=2)
        frozen(Plain(), data, tmp_path, callback, **saved).train(resume_from_checkpoint=resume)
        found.append(callback.gns.largest())
        lines.append([line for line in log.read_text().splitlines() if "kind" in line])
    assert found[0] == found[1] and len(found[0]) == STEPS * KEPT
    assert lines[1] == lines[0][2:]  # what was logged before the checkpoint is not logged again


def test_a_checkpoint_between_two_logs(tmp_path: Path) -> None:
    """The resumed run lists the samples of the updates that the interrupted one had not logged."""
    data, seen = named(2 * 4 * N), []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        log = tmp_path / f"{resume is None}.jsonl"
        callback = GNSCallback(**ALWAYS, keep_largest=2 * N, ids="id", tracker=JSONLTracker(log))
        saved = dict(save_strategy="steps", save_steps=3, max_steps=4, logging_steps=2)
        frozen(Plain(), data, tmp_path, callback, **saved).train(resume_from_checkpoint=resume)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        samples = [s for line in lines if "kind" in line for s in line["samples"]]
        seen.append({s["update"] for s in samples})
    assert seen == [{0, 1, 2, 3}, {2, 3}]


def test_a_reset_counts_updates_from_0(tmp_path: Path) -> None:
    """As after code that freezes parameters."""

    class Resets(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                callback.gns.reset()

    tracker = JSONLTracker(tmp_path / "run.jsonl")
    callback = GNSCallback(**ALWAYS, keep_largest=1, ids="id", tracker=tracker)
    options = dict(max_steps=4, logging_steps=2)
    frozen(Plain(), named(2 * 4 * N), tmp_path, callback, Resets(), **options).train()
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    seen = [(each["step"], each["samples"][0]["update"]) for each in lines if "kind" in each]
    assert [step for step, _ in seen] == [2, 4] and seen[1][1] == 0


class Takes(Plain):
    """Has an argument of the column's name."""

    def forward(self, input_ids: Tensor, labels: Any = None, id: Any = None) -> dict[str, Tensor]:
        assert id.shape == (len(input_ids),)
        return super().forward(input_ids, labels)


def test_a_model_that_takes_the_column(tmp_path: Path) -> None:
    data = [{**s, "id": k} for k, s in enumerate(samples(2 * STEPS * N))]
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id")
    frozen(Takes(), data, tmp_path, callback).train()
    check(callback.gns.largest(), data, 2 * N, KEPT)


def test_documents(tmp_path: Path) -> None:
    """A collator that packs rows has a name for each; rows that were packed before have not."""
    data = [{"input_ids": s["input_ids"], "id": s["id"]} for s in named(2 * STEPS * N)]
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id")
    trainer = frozen(Bytes(), data, tmp_path, callback)
    trainer.data_collator = Flattening(rows=1, mask=False)
    trainer.train()
    assert {one.id for one in callback.gns.largest()} <= {s["id"] for s in data}
    packed = {"position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])}
    packed |= {"input_ids": torch.arange(9), "labels": torch.arange(9)}
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id")
    with pytest.raises(ValueError, match="8 packed documents, but the column names 4 rows"):
        frozen(Bytes(), [{**packed, "id": "a"}] * 24, tmp_path, callback).train()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"GNSCallback\(keep_largest=16\) keeps"):
        GNSCallback(**ALWAYS, ids="id")
    data = named(2 * STEPS * N)
    callback = GNSCallback(**ALWAYS, keep_largest=1, ids="name")
    with pytest.raises(ValueError, match="the batch has input_ids, labels, but no 'name'"):
        frozen(Plain(), data, tmp_path, callback).train()
    trainer = frozen(Plain(), data, tmp_path)
    trainer.add_callback(GNSCallback(**ALWAYS, keep_largest=1, ids="id"))
    with pytest.raises(ValueError, match=r"made with, Trainer\(callbacks=\[...\]\)"):
        trainer.train()


def test_a_removed_callback_leaves_no_column(tmp_path: Path) -> None:
    """Its training does not take it out of the batches."""
    callback = GNSCallback(**ALWAYS, keep_largest=1, ids="id")
    trainer = frozen(Plain(), named(2 * STEPS * N), tmp_path, callback)
    trainer.remove_callback(callback)
    assert "id" not in next(iter(trainer.get_train_dataloader()))
    trainer.train()


def two_processes(rank: int, folder: str, data: list[Named]) -> None:
    as_launched(rank)
    log, found = Path(folder, "run.jsonl"), []
    for resume in (None, f"{folder}/checkpoint-2"):
        tracker = JSONLTracker(log) if rank == 0 and resume is None else None
        callback = GNSCallback(**ALWAYS, keep_largest=2 * N, ids="id", tracker=tracker)
        saved = dict(save_strategy="steps", save_steps=2, ddp_backend="gloo")
        trainer = frozen(Plain(), data, Path(folder), callback, **saved)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.accelerator.num_processes == 2
        found.append(callback.gns.largest())
    assert found[0] == found[1]
    check(found[0], data, 4 * N, 4 * N)


class Stream(torch.utils.data.IterableDataset):
    """One process reads it, and sends the batches to the other."""

    def __init__(self, data: list[Named]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def streamed(rank: int, folder: str, data: list[Named]) -> None:
    """Numbers; then text, of which each process reads its own; then text that cannot be sent."""
    as_launched(rank)
    options: dict[str, Any] = dict(learning_rate=0.0, max_steps=STEPS, report_to=[], use_cpu=True)
    options |= dict(per_device_train_batch_size=N, gradient_accumulation_steps=2)
    options |= dict(save_strategy="no", disable_tqdm=True, ddp_backend="gloo")

    def train(data: list[Named], **more: Any) -> list[LargestSample]:
        callback = GNSCallback(**ALWAYS, keep_largest=2 * N, ids="id")
        args = hf.TrainingArguments(output_dir=folder, **options, **more)
        hf.Trainer(Plain(), args, train_dataset=Stream(data), callbacks=[callback]).train()
        return callback.gns.largest()

    numbered = [{**s, "id": k} for k, s in enumerate(data)]
    check(train(numbered), numbered, 4 * N, 4 * N)
    check(train(data, accelerator_config={"dispatch_batches": False}), data, 4 * N, 4 * N)
    if rank == 0:  # the other would wait for its batch
        callback = GNSCallback(**ALWAYS, keep_largest=1, ids="id")
        args = hf.TrainingArguments(output_dir=folder, **options)
        trainer = hf.Trainer(Plain(), args, train_dataset=Stream(data), callbacks=[callback])
        batches = iter(trainer.get_train_dataloader().base_dataloader)
        with pytest.raises(ValueError, match="cannot send 'file 0'. Use a column of whole numbers"):
            next(batches)


@pytest.mark.parametrize("name", [str, lambda k: 2**64 - 1 - k], ids=["text", "hashes"])
@pytest.mark.parametrize("kind", [list, Stream], ids=["list", "stream"])
def test_one_process_sends_nothing(kind: Any, name: Any, tmp_path: Path) -> None:
    """So it may have names that no tensor holds, as a hash of 64 bits without a sign."""
    data = [{**s, "id": name(k)} for k, s in enumerate(samples(2 * STEPS * N))]
    callback = GNSCallback(**ALWAYS, keep_largest=KEPT, ids="id")
    trainer = frozen(Plain(), data, tmp_path, callback)
    if kind is Stream:
        args = trainer.args
        trainer = hf.Trainer(Plain(), args, train_dataset=Stream(data), callbacks=[callback])
    trainer.train()
    check(callback.gns.largest(), data, 2 * N, KEPT)


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_streams(tmp_path: Path) -> None:
    spawn(streamed, 2, (str(tmp_path), named(4 * STEPS * N)), method="fork")


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    """Each lists the samples of both, also after a checkpoint that one of them has written."""
    data = named(4 * STEPS * N)
    spawn(two_processes, 2, (str(tmp_path), data), method="fork")
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert [len(each["samples"]) for each in lines if "kind" in each] == [2 * N] * STEPS

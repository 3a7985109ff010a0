# SPDX-License-Identifier: Apache-2.0
"""Trainer's logged noise scale is that of a hand-written loop over the same batches."""

import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainer_cases
import transformers as hf
from controller_cases import Lines
from noise_cases import ALWAYS, one_update
from processes import as_launched, spawn
from torch import Tensor, nn

import gnsfast
from gnsfast.integrations import measuring
from gnsfast.integrations.transformers import GNSCallback
from gnsfast.integrations.trl_head import measured_head

V, T, N, STEPS = 23, 9, 4, 12
Sample = dict[str, Tensor]
samples = partial(trainer_cases.samples, length=T, labelled=3)


def tiny_gpt() -> nn.Module:
    torch.manual_seed(1)
    config = hf.GPT2Config(
        vocab_size=V,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=T,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config)


class Plain(nn.Module):
    """Takes no loss kwargs; its loss is the mean over the labels of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found


def trainer_of(
    model: nn.Module, data: list[Sample], folder: Path, *callbacks: Any, **options: Any
) -> hf.Trainer:
    options = {
        "per_device_train_batch_size": N,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1e-3,
        "max_steps": STEPS,
        "logging_steps": STEPS,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }

    class InOrder(hf.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    args = hf.TrainingArguments(output_dir=str(folder), **options)
    return InOrder(
        model=model, args=args, train_dataset=data, eval_dataset=data[:N], callbacks=list(callbacks)
    )


def by_hand(
    model: nn.Module,
    data: list[Sample],
    *,
    causal: bool,
    divided: str,
    smoothing: float = 0.0,
    accumulated: int = 2,
) -> gnsfast.NoiseScale:
    """Steps of two micro-batches, clipped: AdamW as Trainer sets it up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    gns = gnsfast.GradientNoiseScale(model)
    model.train()
    batches = [hf.default_data_collator(data[k : k + N]) for k in range(0, len(data), N)]
    windows = [batches[k : k + accumulated] for k in range(0, len(batches), accumulated)]
    for window in windows[:STEPS]:
        targets = [b["labels"][:, 1:] if causal else b["labels"] for b in window]
        total = sum(int((t != -100).sum()) for t in targets)
        with gns.update():
            for batch, target in zip(window, targets):
                counts = (target != -100).sum(1)
                scale = {"items": counts.sum() / total, "window": 1 / len(window), "no": 1.0}[
                    divided
                ]
                with gns.microbatch(len(counts), tokens=counts, scale=float(scale)):
                    outputs = model(input_ids=batch["input_ids"])
                    logits = outputs["logits"][:, :-1] if causal else outputs["logits"]
                    loss = F.cross_entropy(
                        logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing
                    )
                    (loss * scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return gns.compute()


def check(logs: dict[str, float], truth: gnsfast.NoiseScale) -> None:
    assert truth.resolved and truth.updates == STEPS
    assert logs["gns/b_simple"] == pytest.approx(truth.noise_scale, rel=1e-5)
    assert logs["gns/b_simple_lo"] == pytest.approx(truth.lower, rel=1e-5)
    assert logs["gns/b_simple_hi"] == pytest.approx(truth.upper, rel=1e-5)
    assert logs["gns/trace"] == pytest.approx(truth.trace, rel=1e-5)
    assert logs["gns/grad_sq"] == pytest.approx(truth.grad_sqnorm, rel=1e-5)


def logged(trainer: hf.Trainer) -> dict[str, float]:
    return next(entry for entry in trainer.state.log_history if "gns/b_simple" in entry)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_causal_model(tmp_path: Path, smoothing: float) -> None:
    """``num_items_in_batch``, accumulation, clipping; an epoch's last window is short."""
    data, callback = samples((2 * STEPS - 1) * N - 1), GNSCallback(**ALWAYS)
    trainer = trainer_of(
        tiny_gpt(), data, tmp_path, callback, label_smoothing_factor=smoothing, num_train_epochs=1
    )
    methods = [trainer.training_step, trainer.compute_loss, trainer.log]
    trainer.train()
    truth = by_hand(tiny_gpt(), data, causal=True, divided="items", smoothing=smoothing)
    check(logged(trainer), truth)
    assert [trainer.training_step, trainer.compute_loss, trainer.log] == methods
    assert callback.compute().per_module.keys() == truth.per_module.keys()


def test_model_without_loss_kwargs(tmp_path: Path) -> None:
    """Trainer divides its losses by the micro-batches of the window, one in the last one."""
    data = samples((2 * STEPS - 1) * N - 1)
    model = Plain()
    trainer = trainer_of(model, data, tmp_path, GNSCallback(**ALWAYS), num_train_epochs=1)
    assert not trainer.model_accepts_loss_kwargs
    trainer.train()
    check(logged(trainer), by_hand(Plain(), data, causal=False, divided="window"))


def test_evaluation_and_a_gradient_scaler(tmp_path: Path) -> None:
    """Neither changes a bit; Accelerate has a scaler on GPUs alone, so it is handed one."""
    data, results = samples(2 * STEPS * N), []
    for scaled in (False, True):
        callback = GNSCallback(**ALWAYS)
        options = dict(eval_strategy="steps", eval_steps=2) if scaled else {}
        trainer = trainer_of(tiny_gpt(), data, tmp_path, callback, max_grad_norm=0.0, **options)
        if scaled:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer.train()
        results.append(callback.compute())
    assert results[0] == results[1]


def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    data, states = samples(2 * STEPS * N), []
    for resume in (None, str(tmp_path / "checkpoint-5")):
        callback = GNSCallback(**ALWAYS, window=4)
        options = dict(
            save_strategy="steps", save_steps=5, restore_callback_states_from_checkpoint=True
        )
        trainer = trainer_of(tiny_gpt(), data, tmp_path, callback, **options)
        trainer.train(resume_from_checkpoint=resume)
        states.append(callback.gns.state_dict())
    assert states[0]["measured"] == STEPS
    assert torch.equal(states[0]["ring"], states[1]["ring"])
    assert torch.equal(states[0]["flags"], states[1]["flags"])
    assert {**states[0], "ring": 0, "flags": 0} == {**states[1], "ring": 0, "flags": 0}
    trainer.train()  # not resumed: begins anew
    assert callback.compute().updates == 4 and callback.gns.state_dict()["measured"] == STEPS


class Deaf(Plain):
    """Takes num_items_in_batch and does not use it, as BERT and T5 do: nobody divides its loss."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


def test_model_that_ignores_num_items(tmp_path: Path) -> None:
    data, lines = samples(2 * STEPS * N), Lines()
    options = dict(logging_steps=STEPS // 2, include_num_input_tokens_seen="all")
    callback = GNSCallback(**ALWAYS, tracker=lines, per_module=True)
    trainer = trainer_of(Deaf(), data, tmp_path, callback, **options)
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    truth = by_hand(Deaf(), data, causal=False, divided="no")
    assert [step for step, _ in lines.seen] == [STEPS // 2, STEPS]
    check(lines.seen[1][1], truth)
    assert lines.seen[1][1]["tokens"] == len(data) * T
    assert "loss" in lines.seen[1][1]
    assert lines.seen[1][1]["gns/layer/head"] == pytest.approx(
        truth.per_module["head"].noise_scale, rel=1e-5
    )
    for (_, seen), entry in zip(lines.seen, trainer.state.log_history):
        assert seen.items() <= entry.items()


def test_the_first_batch_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For parts of samples, in every training once."""
    seen: list[Any] = []
    monkeypatch.setattr(measuring, "refuse_parts", seen.append)
    callback = GNSCallback(**ALWAYS)
    for trainings in (1, 2):
        trainer_of(Plain(), samples(2 * STEPS * N), tmp_path, callback).train()
        assert len(seen) == trainings and "input_ids" in seen[-1]


def test_the_head_of_trl_is_measured_for_a_while() -> None:
    """TRL's own forward is back afterwards."""
    model, of_trl = tiny_gpt(), {"__name__": "trl.trainer"}
    exec("def forward(self, *args, **kwargs): pass", of_trl)
    model.forward = theirs = types.MethodType(of_trl["forward"], model)
    with measured_head(model, lambda: False):
        assert model.forward is not theirs and model.forward.__wrapped__ is theirs
    assert vars(model)["forward"] is theirs


class Classify(Plain):
    """One label a sample; with ``squares``, one number a sample."""

    def __init__(self, squares: bool) -> None:
        super().__init__()
        self.squares = squares

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids)).mean(1)
        if self.squares:
            return {"logits": logits, "loss": F.mse_loss(logits[:, 0], labels)}
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("squares", [False, True])
def test_means_over_samples(tmp_path: Path, squares: bool) -> None:
    """Found for a cross entropy; a squared error has to be named."""
    data = [{**s, "labels": s["labels"][-1]} for s in samples(2 * STEPS * N)]
    if squares:
        data = [{**s, "labels": s["labels"].float()} for s in data]
    results = []
    for loss in ("samples", "auto"):
        model, callback = Classify(squares), GNSCallback(**ALWAYS, loss=loss)
        trainer = trainer_of(model, data, tmp_path, callback)
        if squares and loss == "auto":
            with pytest.raises(ValueError, match=r"pass GNSCallback\(loss='samples'\)"):
                trainer.train()
            return
        trainer.train()
        results.append(callback.compute())
    for name in ("noise_scale", "trace", "grad_sqnorm", "lower", "upper"):
        assert getattr(results[0], name) == pytest.approx(getattr(results[1], name), rel=1e-6)
    model = Classify(False)
    gns = gnsfast.GradientNoiseScale(model)
    with gns.update():
        for k in (0, N):  # the first window, before any step
            batch = hf.default_data_collator(data[k : k + N])
            with gns.microbatch(N, scale=0.5):
                (model(**batch)["loss"] / 2).backward()
    callback = GNSCallback(**ALWAYS)
    trainer_of(Classify(False), data, tmp_path, callback, max_steps=1).train()
    assert callback.compute().trace == pytest.approx(gns.compute().trace, rel=1e-5)
    assert callback.compute().grad_sqnorm == pytest.approx(gns.compute().grad_sqnorm, rel=1e-5)


class Balanced(Plain):
    """As a router's balance does, adds what no sample owns."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] * 1.01}


def test_refusals(tmp_path: Path) -> None:
    data = samples(2 * N)
    with pytest.raises(ValueError, match="loss of the first micro-batch"):
        trainer_of(Balanced(), data, tmp_path, GNSCallback(**ALWAYS)).train()
    with pytest.raises(ValueError, match="loss must be 'auto' or one of"):
        GNSCallback(**ALWAYS, loss="mean")
    with pytest.raises(RuntimeError, match="not called by a transformers.Trainer"):
        GNSCallback(**ALWAYS).on_train_begin(None, None, None)
    trainer = trainer_of(Plain(), data, tmp_path, GNSCallback(**ALWAYS))
    trainer.args._n_gpu = 2
    with pytest.raises(NotImplementedError, match="DataParallel"):
        trainer.train()


class Twice(hf.Trainer):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        with torch.enable_grad():
            self.compute_loss(model, dict(inputs))
        return super().training_step(model, inputs, *args)


class Fails(hf.TrainerCallback):
    """At the third of such events, and then never again."""

    def __init__(self, event: str) -> None:
        self.left = 3
        setattr(self, event, self.fail)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("the third")


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end"])
def test_after_an_error(tmp_path: Path, event: str) -> None:
    """In the middle of an update or after it: a new train() reads nothing of what it left."""
    data, callback = samples(4 * N), GNSCallback(**ALWAYS)
    trainer = trainer_of(Plain(), data, tmp_path, callback, Fails(event))
    step = trainer.training_step

    def own(*args: Any) -> Any:
        return step(*args)

    trainer.training_step = own
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.train()
    assert callback.compute().updates == STEPS
    assert trainer.training_step is own and "log" not in vars(trainer)


def test_two_losses_in_a_step(tmp_path: Path) -> None:
    args = trainer_of(Plain(), data := samples(2 * N), tmp_path).args
    model = Plain()
    trainer = Twice(model=model, args=args, train_dataset=data, callbacks=[GNSCallback(**ALWAYS)])
    with pytest.raises(gnsfast.ObservationError, match="called compute_loss 2 times"):
        trainer.train()


def two_processes(rank: int, folder: str, data: list[Sample]) -> None:
    as_launched(rank)
    callback = GNSCallback(**ALWAYS)
    trainer = trainer_of(tiny_gpt(), data, Path(folder), callback, ddp_backend="gloo")
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    if rank == 0:
        torch.save(logged(trainer), f"{folder}/logs.pt")


def test_scale_in_a_tensor() -> None:
    """``scale`` and ``tokens`` may be filled in inside of the block: they are read at its end."""
    results = []
    for late in (False, True):
        model = Plain()
        gns = gnsfast.GradientNoiseScale(model)
        for k in range(3):
            batch = hf.default_data_collator(samples(N, seed=k))
            counts, scale = (batch["labels"] != -100).sum(1), torch.tensor(0.25 * (k + 1))
            tokens = torch.full((N,), torch.nan) if late else counts
            factor = torch.tensor(torch.nan) if late else float(scale)
            with one_update(gns, N, tokens=tokens, scale=factor):
                (model(**batch)["loss"] * scale).backward()
                if late:
                    tokens.copy_(counts)
                    factor.copy_(scale)
        results.append(gns.compute())
    assert results[0] == results[1] and results[0].updates == 3
    with pytest.raises(ValueError, match=r"not a tensor of shape \[2\]"):
        with gns.update(N, scale=torch.ones(2)):
            pass


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    """Trainer's items are those of both, and its losses are multiplied with 2."""
    data = samples(4 * STEPS * N)
    spawn(two_processes, 2, (str(tmp_path), data), method="fork")
    truth = by_hand(tiny_gpt(), data, causal=True, divided="items", accumulated=4)
    check(torch.load(tmp_path / "logs.pt"), truth)


class Stops(Plain):
    """In the first micro-batch of its second update."""

    passes = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.passes += 1
        if self.passes == 4:
            raise RuntimeError("stopped")
        return super().forward(input_ids, labels)


def test_half_an_update_is_not_saved(tmp_path: Path) -> None:
    """A checkpoint that is saved after an error says that it holds no measurements."""
    callback, data = GNSCallback(**ALWAYS), samples(2 * STEPS * N)
    trainer = trainer_of(Stops(), data, tmp_path, callback)
    own = [*trainer.callback_handler.callbacks]
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    [saver] = [c for c in trainer.callback_handler.callbacks if c not in own]
    assert saver.state() == {}
    trainer.model.passes = STEPS
    trainer.train()
    assert trainer.callback_handler.callbacks == own

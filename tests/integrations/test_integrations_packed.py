# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows have the noise scale that the same documents have as padded rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from noise_cases import ALWAYS
from test_integrations_transformers import Plain, samples, tiny_gpt, trainer_of
from torch import Tensor

from gnsfast.integrations.token_losses import Rule, document_starts
from gnsfast.integrations.transformers import GNSCallback

N, STEPS = 4, 12


def documents(count: int) -> list[dict[str, Tensor]]:
    """Of 3 to 9 tokens, all of which are labels."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 10, (count,), generator=generator)
    return [{"input_ids": s["input_ids"][:n]} for s, n in zip(samples(count), lengths)]


def padded(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = [e["input_ids"] for e in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(rows, batch_first=True, padding_value=-100)
    labels[:, 0] = -100  # as where rows are packed
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": pad(rows, batch_first=True), "labels": labels, "attention_mask": mask}


class Flattening(hf.DataCollatorWithFlattening):
    """As many rows of documents, padded to the same length."""

    def __init__(self, rows: int, mask: bool, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.mask = rows, mask

    def __call__(self, examples: list[dict[str, Tensor]], **options: Any) -> dict[str, Tensor]:
        if self.rows == 1:
            return super().__call__(examples)
        half = len(examples) // 2
        parts = [super(Flattening, self).__call__(e) for e in (examples[:half], examples[half:])]
        T = max(p["input_ids"].shape[1] for p in parts)
        fills = {"input_ids": 0, "labels": -100, "position_ids": 0}
        joined = {
            key: torch.cat([F.pad(p[key], (0, T - p[key].shape[1]), value=fill) for p in parts])
            for key, fill in fills.items()
        }
        if self.mask:
            real = [torch.arange(T) < p["input_ids"].shape[1] for p in parts]
            joined["attention_mask"] = torch.stack(real).long()
        return joined


class Bytes(Plain):
    """Takes positions, and does not use them."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


KINDS: dict[str, dict[str, Any]] = {
    "positions": dict(rows=1, mask=False),
    "FlashAttention's": dict(rows=1, mask=False, return_flash_attn_kwargs=True),
    "padded rows": dict(rows=2, mask=False),
    "padded rows, masked": dict(rows=2, mask=True),
}


def assert_packed_as_padded(folder: Path, make: Any, kind: str, loss: str = "auto") -> None:
    data, found = documents(2 * STEPS * N), []
    for collate in (padded, Flattening(**KINDS[kind])):
        callback = GNSCallback(**ALWAYS, loss=loss)
        trainer = trainer_of(make(), data, folder, callback)
        trainer.data_collator, trainer.args.remove_unused_columns = collate, False
        trainer.train()
        found.append(callback.compute())
    assert found[0].samples == found[1].samples == 2 * STEPS * N
    for name in ("noise_scale", "trace", "grad_sqnorm", "lower", "upper"):
        assert getattr(found[1], name) == pytest.approx(getattr(found[0], name), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["auto", "tokens"])
def test_packed_documents(tmp_path: Path, kind: str, loss: str) -> None:
    assert_packed_as_padded(tmp_path, Bytes, kind, loss)


def test_a_causal_model_with_attention(tmp_path: Path) -> None:
    """Documents do not attend to each other, and a position predicts the next one."""

    def make() -> Any:
        model: Any = tiny_gpt()
        model.config.use_cache = False
        return model

    assert_packed_as_padded(tmp_path, make, "positions")


def test_document_starts() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 0, 0]])
    labels = torch.tensor([[-100, 1, 1, -100, 1], [7, -100, 1, -100, -100]])
    assert document_starts({"labels": labels}) is None
    assert document_starts({"position_ids": torch.arange(5)[None]}) is None
    assert document_starts({"position_ids": torch.arange(5)}) is None
    starts = document_starts({"position_ids": positions, "labels": labels})
    assert starts is not None and starts.tolist() == [0, 3, 5, 6, 10]
    assert Rule("tokens", True).counts({"labels": labels}, starts).tolist() == [2, 1, 1, 1]
    assert Rule("causal", True).counts({"labels": labels}, starts).tolist() == [2, 1, 0, 1]
    every = {"labels": torch.ones(1, 5).long()}  # the last position of a document predicts too
    assert Rule("causal", True).counts(every, torch.tensor([0, 3, 5])).tolist() == [3, 1]
    given = {
        "position_ids": torch.zeros(1, 3, dtype=torch.long),
        "labels": labels[:1, :3] * 0 - 100,
    }
    assert document_starts(given) is None  # nothing but padding
    left = {"position_ids": torch.tensor([[0, 0, 0, 1, 0, 1]]), "labels": torch.ones(1, 6).long()}
    left["labels"][0, :2] = -100
    starts = document_starts(left)
    assert starts is not None and starts.tolist() == [0, 4, 6]  # padding goes with its neighbour


def test_marks_without_positions(tmp_path: Path) -> None:
    data = documents(4 * N)
    collate = hf.DataCollatorWithFlattening(return_seq_idx=True, return_position_ids=False)
    trainer = trainer_of(Bytes(), data, tmp_path, GNSCallback(**ALWAYS, loss="tokens"))
    trainer.data_collator, trainer.args.remove_unused_columns = collate, False
    with pytest.raises(NotImplementedError, match="are packed .it has seq_idx., but no positi"):
        trainer.train()

# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer with packing: its fused head is measured, a document is a sample."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients.recipes import Ran, Recipe, against, compare, squared_variation
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("trl")


def document_loss(mean_tokens: float) -> Any:
    def loss(model: nn.Module, document: Tensor) -> Tensor:
        logits = model(input_ids=document[None], use_cache=False).logits
        return F.cross_entropy(logits[0, :-1], document[1:], reduction="sum") / mean_tokens

    return loss


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ratio(ran: Ran) -> tuple[float, float]:
    """The noise scale that a run at a learning rate of 0 found, and that of brute force."""
    documents = [torch.tensor(d) for d in ran.names["documents"]]
    predicted = [len(d) - 1 for d in documents]
    loss = document_loss(sum(predicted) / len(predicted))
    truth = gnsfast.brute_force_noise_scale(ran.names["trainer"].model, loss, documents)
    return ran.names["noise_scale"], truth.noise_scale - squared_variation(predicted)


EACH = ('GNSCallback(loss="causal")', 'GNSCallback(loss="causal", budget=None, on_error="raise")')


def test_recipe() -> None:
    row = compare(RECIPE, "trl")
    against(row, *ratio(RECIPE.run(edits=[EACH], LEARNING_RATE=0.0, STEPS=16)))


TIED = ("    eos_token_id=1,\n)", "    eos_token_id=1,\n    tie_word_embeddings=True,\n)")
FREE = ("packing=True,\n        max_length=64", "padding_free=True, max_length=None")
ROWS = ("packing=True", "packing=False")


@pytest.mark.parametrize("edits", [[TIED], [FREE], [ROWS], [TIED, ROWS]])
def test_other_ways_to_train(edits: list[tuple[str, str]]) -> None:
    """A head that shares its weight, rows without padding, rows with it."""
    steps = 16 if not {FREE, ROWS} & set(edits) else 100  # as many documents
    found, truth = ratio(RECIPE.run(edits=[*edits, EACH], LEARNING_RATE=0.0, STEPS=steps))
    assert abs(found / truth - 1) < 0.1, (found, truth)


def test_the_model_is_left_as_it_was() -> None:
    model = RECIPE.run(STEPS=2).names["trainer"].model
    assert model.forward.__func__.__globals__["__name__"] == "trl.trainer.utils"


def test_a_scale_that_is_not_known() -> None:
    edits = [(f"Llama{end}", f"Granite{end}") for end in ("Config", "ForCausalLM")]
    edits += [("    eos_token_id=1,\n)", "    eos_token_id=1,\n    logits_scaling=8.0,\n)")]
    with pytest.raises(gnsfast.ObservationError, match="GraniteForCausalLM changes its logits"):
        RECIPE.run(edits=[*edits, EACH], STEPS=2)
    plain, ours = RECIPE.run(False, edits), RECIPE.run(True, edits)
    assert plain.losses == ours.losses  # it goes on, with TRL's own head
    assert ours.names["callback"].compute().errors == 1


def test_a_frozen_head() -> None:
    """LoRA trains no head: TRL's own forward stays."""
    edits = [
        (
            "trainer = SFTTrainer(",
            "import peft\ntrainer = SFTTrainer(\n"
            "    peft_config=peft.LoraConfig(target_modules=['q_proj']),",
        ),
    ]
    assert RECIPE.run(edits=[*edits, EACH], STEPS=2).names["callback"].compute().updates == 2


NAMED: list[tuple[str, str]] = [
    ('{"input_ids": documents}', '{"input_ids": documents, "id": names}'),
    ("config = Llama", "names = [f'file {k}' for k in range(len(documents))]\nconfig = Llama"),
    (
        "trainer = SFT",
        "callback = GNSCallback(budget=None, on_error='raise', keep_largest=4, ids='id')\n"
        "trainer = SFT",
    ),
    ("    model=model,", "    callbacks=[callback],\n    model=model,"),
    ('callback = GNSCallback(loss="causal")  # new\n', ""),
    ("trainer.add_callback(callback)  # new\n", ""),
]


@pytest.mark.parametrize("edits", [[FREE], [ROWS]], ids=["documents", "rows"])
def test_a_column_of_text_names_samples(edits: list[tuple[str, str]]) -> None:
    """At weights that stay, the sample with the largest share is that of a loop over all."""
    ran = RECIPE.run(edits=[*edits, *NAMED], LEARNING_RATE=0.0, STEPS=12)
    found = ran.names["callback"].gns.largest()
    model, documents = ran.names["trainer"].model, ran.names["documents"]
    sqnorms = []
    for one in found:
        document = torch.tensor(documents[int(one.id.removeprefix("file "))])
        grads = torch.autograd.grad(document_loss(1.0)(model, document), [*model.parameters()])
        sqnorms.append(sum(float(g.square().sum()) for g in grads))
    assert len({one.id for one in found}) == len(found) == 12 * 4
    for update in range(12):  # which has one divisor
        own = [s / one.sqnorm for s, one in zip(sqnorms, found) if one.update == update]
        assert own == pytest.approx([own[0]] * 4, rel=1e-3)


def test_rows_that_were_packed_have_no_names() -> None:
    with pytest.raises(ValueError, match="but no 'id'"):
        RECIPE.run(edits=NAMED, STEPS=2)

# SPDX-License-Identifier: Apache-2.0
"""Attention whose documents see each other through the mask is refused, and other masks are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gnsfast
from gnsfast.layers import document_masks

H, D, T = 2, 8, 6
STARTS = torch.tensor([0, 2, 6, 6, 9, 12])
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
REFUSED = r"attend to each other.*attn_mask \[rows \* heads, T, T\]"


def hidden(starts: Tensor = STARTS) -> Tensor:
    """[rows * H, T, T]: True for pairs of different documents."""
    of_N = torch.bucketize(torch.arange(2 * T), starts[1:-1], right=True).view(2, T)
    return (of_N[:, :, None] != of_N[:, None]).repeat_interleave(H, 0)


def measure(
    attn_mask: Tensor | None, starts: Tensor = STARTS, trained: str = "", **options: Tensor | bool
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer, x = gnsfast.MultiheadAttention(D, H, batch_first=True), torch.randn(2, T, D)
    for name, p in layer.named_parameters():
        p.requires_grad_(name.startswith(trained))
    x.requires_grad_()
    gnsfast.convert(layer)
    samples = len(starts) - 1
    with gnsfast.per_sample_sqnorms(layer, samples, cu_seqlens=starts) as norms:
        layer(x, x, x, attn_mask=attn_mask, **options)[0].square().sum().backward()
    return dict(norms)


def nearly(change: Callable[[Tensor], None]) -> Tensor:
    mask = hidden().clone()
    change(mask)
    return mask


def float_mask(low: float, mask: Tensor | None = None) -> Tensor:
    return torch.zeros(2 * H, T, T).masked_fill(hidden() if mask is None else mask, low)


SEEN = {
    "causal [T, T]": (CAUSAL, {}),
    "all padding False": (None, {"key_padding_mask": torch.zeros(2, T, dtype=torch.bool)}),
    "one pair of one head": (nearly(lambda m: m[3, 5].__setitem__(1, False)), {}),
    "a shared mask of the first row": (hidden()[0], {}),
    "a small number": (float_mask(-50.0), {}),
    "a query that sees nothing": (float_mask(-1e9).index_fill(1, torch.tensor(0), -1e9), {}),
    "zeros": (torch.zeros(T, T), {}),
}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end"])
@pytest.mark.parametrize("trained", ["", "in_proj", "out_proj"])
@pytest.mark.parametrize("case", SEEN)
def test_documents_that_see_each_other(
    case: str, trained: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU at once; on a GPU, which no pass waits for, at the end of the block."""
    if late:
        monkeypatch.setattr(document_masks, "refuse_at_once", lambda apart: False)
    mask, options = SEEN[case]
    for need_weights in (False, True):
        with pytest.raises(gnsfast.ObservationError, match=REFUSED):
            measure(mask, trained=trained, need_weights=need_weights, **options)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end"])
def test_documents_that_are_apart(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr(document_masks, "refuse_at_once", lambda apart: False)
    truth = measure(hidden())
    causal = measure(hidden() | CAUSAL)
    for low in (-9984.0, -1e9, torch.finfo(torch.float32).min, -torch.inf):
        for mask, same in ((None, truth), (hidden() | CAUSAL, causal)):
            for name, norms in measure(float_mask(low, mask)).items():
                torch.testing.assert_close(norms, same[name])
    # Documents that begin at the same places of both rows may share a mask [T, T].
    alike = torch.tensor([0, 2, 6, 8, 12])
    shared = measure(hidden(alike)[0], alike)
    for name, norms in measure(hidden(alike), alike).items():
        torch.testing.assert_close(norms, shared[name])
    # Where each row is one document, no mask lets it see another.
    padding = torch.zeros(2, T, dtype=torch.bool)
    measure(None, torch.tensor([0, T, 2 * T]), key_padding_mask=padding)


def test_a_query_that_sees_no_key() -> None:
    """Padding that attends to nothing sees no other document either."""
    bias = float_mask(-torch.inf).view(2, H, T, T)
    bias[:, :, 3] = -torch.inf
    assert document_masks.keeps_apart(bias, STARTS, 2)
    bias[:, :, 3] = -1e9
    assert not document_masks.keeps_apart(bias, STARTS, 2)

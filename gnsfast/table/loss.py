# SPDX-License-Identifier: Apache-2.0
"""The proof of a loss: is the gradient of a batch the weighted sum of those of its samples, with
the weights that the noise scale takes them to have?

The noise scale takes a sample's weight in a mean to be u_b = L_b / Σ L, where L_b are its tokens,
or 1 without ``tokens``; in a sum it is 1. A loss that divides by what the batch happens to hold has
other weights, or none, where samples meet in it. Gradients are compared in 4,096 numbers: random
signs, added up in random places. A gradient that is such a sum is one in these numbers too, and
one that is not differs in them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gnsfast.following import Leaf, gradients
from gnsfast.kept import kept_modes
from gnsfast.parallel import shared
from gnsfast.table.proof import ModelError, Trial, of_the_model
from gnsfast.table.table import PROVEN
from gnsfast.tensors import tensors_of, whole

MOST = 16
"""So many samples of a batch are compared at most."""

BUCKETS = 4096


def loss_proof(trial: Trial, weights: Tensor | None, rtol: float) -> str:
    """``PROVEN``, or why the loss, which is what ``trial.run`` returns, is none that a noise scale
    may have, with the ``weights`` of all samples.
    """
    structure, n = trial.followed.structure, max(trial.samples.n, 1)
    few = shared(min(n, MOST), min, structure.groups)
    order = [k * n // few for k in range(few)]
    weights_B = torch.ones(few, dtype=torch.float64)
    if weights is not None:
        weights_B = weights.detach().cpu().double()[order]
    try:
        with kept_modes(structure.model):
            structure.model.eval()
            batch = _sketch(trial, order)
            samples = [_sketch(trial, [b]) for b in order]
    except ModelError as error:
        return shared(f"it does not take a single sample ({error})", max, structure.groups)
    each = torch.stack(samples)
    each[weights_B == 0] = 0.0  # of padding: a mean over nothing is no number
    return shared(
        _verdict(batch, each, weights_B, weights is not None, rtol), _worse, structure.groups
    )


def _verdict(batch: Tensor, each: Tensor, weights_B: Tensor, is_weighted: bool, rtol: float) -> str:
    """What the gradients [S] of the batch and [B, S] of each sample show."""
    alone = each.isfinite().all(1)
    if not bool(batch.isfinite().all()):
        return "its gradient is not finite"
    if not bool(alone.all()):
        return (
            f"it is no number for {int((~alone).sum())} of {len(each)} samples alone, as a mean "
            f"over no token and a deviation of one sample are. {ADVICE}"
        )
    if len(each) < 2:
        return "a batch of one sample shows nothing of it"
    if not bool(batch.any()) and not bool(each.any()):
        return "the batch gives it no gradient"
    sums = each.sum(0), weights_B @ each / weights_B.sum()
    if any(_is_close(batch, total, each, rtol) for total in sums):
        return PROVEN
    shares_B = _shares(batch, each, rtol)
    if shares_B is None:
        return (
            f"samples meet in it: its gradient is no weighted sum of those of its samples. {ADVICE}"
        )
    some = " : ".join(f"{share:.3g}" for share in shares_B[:4].tolist())
    than = "those in tokens=" if is_weighted else "equal ones"
    more = " : ..." if len(each) > 4 else ""
    return (
        f"its samples have other weights than {than}, {some}{more}. Give the weight of each "
        "sample, such as that of its class or the number of its tokens that count: "
        "gnsfast.learn(model, batch, loss=loss, tokens=weights) and gns.update(n, tokens=weights)"
    )


def _is_close(batch: Tensor, total: Tensor, each: Tensor, rtol: float) -> bool:
    """Whether two gradients are alike. Where samples cancel, rounding is that of the samples."""
    size = max(float(batch.norm()), float(total.norm()), 1e-3 * float(each.norm()) / len(each))
    return float((batch - total).norm()) <= rtol * size


def _shares(batch: Tensor, each: Tensor, rtol: float) -> Tensor | None:
    """The weights of the samples in the batch's gradient, the smallest of which is 1; None where it
    is no such sum, or where a few parameters leave them open.
    """
    weights_B = torch.linalg.lstsq(each.T, batch[:, None], driver="gelsd").solution[:, 0]
    rank = int(torch.linalg.matrix_rank(each, rtol=1e-5))
    if rank < len(each) or not _is_close(batch, weights_B @ each, each, rtol):
        return None
    return weights_B / weights_B.min() if float(weights_B.min()) > 0 else None


def _worse(a: str, b: str) -> str:
    """What two processes say together."""
    return b if a == PROVEN else a


def _sketch(trial: Trial, order: Sequence[int]) -> Tensor:
    """The gradient of the loss of some samples, as ``BUCKETS`` numbers."""
    leaves = trial.leaves
    batch = trial.samples.some(order)
    structure = trial.followed.structure
    with structure.bare(), structure.as_it_was():
        with of_the_model():
            loss = _scalar(trial.run(batch))
            grads = gradients([(loss, torch.ones_like(loss))], [leaf.current for leaf in leaves])
    sketch, generator = torch.zeros(BUCKETS, dtype=torch.float64), torch.Generator().manual_seed(0)
    if not bool(loss.isfinite()):
        return sketch.fill_(torch.nan)
    for piece in _pieces(leaves, grads):
        at = torch.randint(BUCKETS, piece.shape, generator=generator)
        signs = torch.randint(2, piece.shape, generator=generator) * 2 - 1
        sketch.index_add_(0, at, piece * signs)
    return sketch


def _pieces(leaves: Sequence[Leaf], grads: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """The gradients in pieces, each at the same place in each call."""
    for leaf, g in zip(leaves, grads):
        if g is None:
            g = torch.zeros_like(leaf.current)
        g = whole(g.to_dense() if g.is_sparse else g).detach().flatten()
        for piece in g.split(1 << 20):
            yield piece.cpu().double()


def _scalar(loss: Any) -> Tensor:
    """A loss, which is a number, or the ``loss`` of what a framework's step returns."""
    first = next((t for t in tensors_of(loss) if t.numel() == 1 and t.requires_grad), None)
    if first is None:
        raise TypeError("the loss function returned no number with a gradient")
    number: Tensor = first.reshape(())
    return number


ADVICE = "The page docs/how-to/left-out.md says what has no gradient of a single sample"

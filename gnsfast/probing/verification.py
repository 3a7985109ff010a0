# SPDX-License-Identifier: Apache-2.0
"""``verify`` compares the norms of a user's model with a loop over single samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.following import Followed
from gnsfast.kept import kept, kept_chance
from gnsfast.probing.sample_norms import per_sample_sqnorms
from gnsfast.table import Table, coverage
from gnsfast.tensors import map_tensors, tensors_of


@dataclass(frozen=True)
class VerifiedParameter:
    """The result for one parameter. ``verdict`` is "ok", "wrong", "too small" (to judge),
    "uncovered" or "frozen". ``error`` is the relative error of the worst sample.
    """

    parameter: str
    verdict: str
    error: float | None
    reason: str


@dataclass(frozen=True)
class Verification:
    """The result of ``gnsfast.verify``, which prints as a table. ``ok`` says whether every covered
    norm is right. ``loss_splits`` says whether the batch's gradient is the sum of its samples'.
    """

    rows: tuple[VerifiedParameter, ...]
    loss_splits: bool

    @property
    def ok(self) -> bool:
        return self.loss_splits and all(r.verdict != "wrong" for r in self.rows)

    def __str__(self) -> str:
        width = max((len(r.parameter) for r in self.rows), default=0)
        lines = []
        for r in self.rows:
            error = "" if r.error is None else f"{r.error:.1e}"
            lines.append(
                f"{r.parameter.ljust(width)}  {r.verdict:9}  {error:8}  {r.reason}".rstrip()
            )
        if not self.loss_splits:
            lines.append(
                "The batch's gradient is not the weighted sum of the single samples' gradients. "
                "The loss or a layer ties samples together, or loss_reduction (or weights) is not "
                "that of the loss."
            )
        lines.append("per-sample norms verified" if self.ok else "per-sample norms NOT verified")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    loss_reduction: str = "mean",
    weights: Tensor | None = None,
    batch_dim: int = 0,
    rtol: float | None = None,
    table: Table | None = None,
) -> Verification:
    """Compare the norms of one backward pass with a loop over single samples, for every parameter.

    The loop computes ``autograd.grad(w_b * loss_fn(model, batch[b:b+1]), p)`` for each sample b,
    and its squared norm in float64. The model runs in evaluation mode, because dropout would draw
    other masks. Gradients, modes and random state are restored at the end.

    Args:
        loss_fn: takes the model and a batch, and returns a scalar loss.
        batch: a tensor, or tuples, lists, dicts and dataclasses of tensors. A tensor with B entries
            along ``batch_dim`` (along 0 if it has one dimension) is split into samples. Everything
            else is passed as it is.
        loss_reduction: "mean" (w_b = 1 / B) or "sum" (w_b = 1) over the samples.
        weights: w_b for any other reduction, [B]: for example the sample's tokens divided by the
            batch's tokens.
        rtol: the largest relative error that counts as right. The default is 1e-3, or 5e-2 with
            half-precision parameters.
        table: as in ``per_sample_sqnorms``.

    Raises:
        ValueError: for a batch without tensors or samples, and for an unknown reduction.
        SampleShapeError, ObservationError: as in ``per_sample_sqnorms``.

    >>> model = torch.nn.Linear(5, 2)
    >>> gnsfast.verify(model, lambda m, x: m(x).square().mean(), torch.randn(3, 5)).ok
    True
    """
    tensors = [t for t in tensors_of(batch) if t.ndim]
    if not tensors:
        raise ValueError(
            "verify needs a batch with at least one tensor, which it can split into samples"
        )
    B = tensors[0].shape[_dim(tensors[0], batch_dim)]
    if B == 0:
        raise ValueError("verify needs at least one sample")
    if weights is None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}. For any other "
                "reduction pass weights."
            )
        weights = torch.full((B,), 1.0 / B if loss_reduction == "mean" else 1.0)
    with _left_as_found(model), torch.enable_grad():
        model.eval()
        with per_sample_sqnorms(model, B, table=table) as norms:
            loss_fn(model, batch).backward()
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        summed = {n: p.grad for n, p in trainable.items()}
        loop = {n: torch.zeros(B, dtype=torch.float64) for n in trainable}
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in trainable.items()}
        for b in range(B):
            one = map_tensors(lambda t: _sample(t, b, B, batch_dim), batch)  # noqa: B023
            loss = float(weights[b]) * loss_fn(model, one)
            grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
            for n, g in zip(trainable, grads):
                if g is not None:
                    g = g.to_dense() if g.is_sparse else g
                    loop[n][b] = reference.sqnorm(g)
                    total[n] += g
    if rtol is None:
        coarse = max(torch.finfo(p.dtype).eps for p in trainable.values()) > 1e-5
        rtol = 5e-2 if coarse else 1e-3
    total_B = torch.stack(list(loop.values())).sum(0)
    splits = _splits(summed, total, rtol)
    rows = []
    for row in coverage(model).rows:
        if row.parameter not in norms:
            verdict = "frozen" if row.route == "frozen" else "uncovered"
            rows.append(VerifiedParameter(row.parameter, verdict, None, row.reason))
            continue
        ours_B, loop_B = norms[row.parameter].cpu().double(), loop[row.parameter]
        difference_B = (ours_B - loop_B).abs()
        # If a gradient is zero in exact arithmetic, as for a key bias, both norms are rounding.
        noise_B = (8 * torch.finfo(trainable[row.parameter].dtype).eps) ** 2 * total_B
        error = (difference_B / loop_B.clamp_min(1e-300)).max().item()
        verdict, reason = "ok", ""
        if error > rtol and bool((difference_B <= noise_B).all()):
            verdict, reason = (
                "too small",
                "its norm is no larger than the rounding error of the whole gradient",
            )
        elif error > rtol:
            verdict = "wrong"
        rows.append(VerifiedParameter(row.parameter, verdict, error, reason))
    return Verification(tuple(rows), splits)


def _dim(t: Tensor, batch_dim: int) -> int:
    return batch_dim if t.ndim > 1 else 0


def _sample(t: Tensor, b: int, B: int, batch_dim: int) -> Tensor:
    if not t.ndim or t.shape[_dim(t, batch_dim)] != B:
        return t
    # Contiguous: for one image with the strides of ``image_HWC.permute(2, 0, 1)[None]``, the batch
    # norm of torch 2.13 has wrong gradients on a CPU if that of the output is laid out otherwise.
    return t.narrow(_dim(t, batch_dim), b, 1).contiguous()


def _splits(summed: dict[str, Tensor | None], total: dict[str, Tensor], rtol: float) -> bool:
    """Whether the batch's gradient is the sum of the samples' gradients."""
    difference = scale = 0.0
    for name, grad in summed.items():
        batch = torch.zeros_like(total[name]) if grad is None else grad.to_dense().double()
        difference += reference.sqnorm(batch - total[name]).item()
        scale += max(reference.sqnorm(batch).item(), reference.sqnorm(total[name]).item())
    return difference <= rtol**2 * scale


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, training flags, random state and ``is_audited`` at the end."""
    followed = Followed.of(model)
    is_audited = followed.is_audited
    try:
        with kept(model), kept_chance(model):
            yield
    finally:  # a pass in eval mode does not audit what training runs
        followed.is_audited = is_audited

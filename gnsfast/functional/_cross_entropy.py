# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a linear head, a part of the vocabulary at a time.

A sample's gradient of the head is dlogitsᵀ x, [V, D], and its squared norm is a sum over the V
words. So each part is a linear layer of its own, and the squared norms of the parts add up to those
of the head.

Legend: N rows, B samples of T tokens, G samples at a time, D width, V vocabulary, C words of a
part, S words that a link asks for.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.overrides import handle_torch_function, has_torch_function

from gnsfast import ops
from gnsfast.functional._autocast import autocast_dtype, backward_pass
from gnsfast.functional._links import Link, link_grads
from gnsfast.functional.plan import PLAIN, Plan, samples_first
from gnsfast.tensors import accumulate_dtype, set_columns

CHUNK = 1 << 21
"""The number of logits in memory at a time: 8 MiB of float32, which stay in a CPU's caches. This
takes 0.79 to 0.94 of the time of 1 << 24 logits (512 and 1024 tokens, 32k and 50k words)."""

ON_GPU = 16
"""Times ``CHUNK`` on a GPU, which a part has to fill: 2048 words for 16k tokens (counted)."""

LEAST = 512
"""The fewest words of a part, however many tokens there are: narrower products leave a GPU idle."""


class _Head(NamedTuple):
    """The linear layer, the dtype that it computes in, and the cap of its logits."""

    w_VD: Tensor
    b_V: Tensor | None
    dtype: torch.dtype
    softcap: float | None

    def logits(self, x: Tensor, rows: slice | Tensor) -> Tensor:
        """The logits of the words ``rows``: [..., rows], float32, or float64 for float64."""
        w, b = self.w_VD[rows].to(self.dtype), None
        if self.b_V is not None:
            b = self.b_V[rows].to(self.dtype)
        z = torch_linear(x, w, b) if isinstance(rows, slice) else x @ w.mT
        if b is not None and not isinstance(rows, slice):
            z += b[..., None, :]
        z = z.to(accumulate_dtype(self.dtype))
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)


class _Tokens(NamedTuple):
    """The numbers that give each token's dlogits, each [..., 1]: its label, its log-sum-exp, and
    three factors. dlogits = ``share`` · softmax - ``flat``, and at the label - ``hit``.
    """

    label: Tensor
    lse: Tensor
    share: Tensor
    flat: Tensor
    hit: Tensor

    def dlogits(self, z: Tensor, words: slice | Tensor, softcap: float | None) -> Tensor:
        """The gradient of ``z``, the logits of ``words``, which it overwrites."""
        slope = None if softcap is None else (z / softcap).square_().neg_().add_(1.0)
        dz = z.sub_(self.lse).exp_().mul_(self.share).sub_(self.flat)
        if isinstance(words, slice):
            column, inside = _within(self.label, words)
            hit = dz.gather(-1, column) - torch.where(inside, self.hit, 0.0)
            set_columns(dz.flatten(0, -2), column.flatten(0, -2), hit.flatten(0, -2))
        else:
            dz -= torch.where(self.label == words[..., None, :], self.hit, 0.0)
        return dz if slope is None else dz.mul_(slope)


class _LinearCrossEntropy(torch.autograd.Function):
    """Each token's loss [N, 1] in float32, or float64 for float64. A label of -1 is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        w_VD: Tensor,
        b_V: Tensor | None,
        probe: Tensor | None,
        plan: Plan,
        label_N1: Tensor,
        softcap: float | None,
        smoothing: float,
        z_loss: float,
        *links: Tensor,
    ) -> Tensor:
        _, need_w, need_b, *_ = ctx.needs_input_grad
        if probe is not None:
            plan.check("linear_cross_entropy", probe, need_w + need_b, w_VD, bool(links))
        ctx.samples = None if probe is None else plan.samples(probe)
        ctx.probe_shape = None if probe is None else probe.shape
        ctx.plan = plan.without_tensors()
        ctx.softcap, ctx.smoothing, ctx.z_loss = softcap, smoothing, z_loss
        head = _Head(w_VD, b_V, x_ND.dtype, softcap)
        lse_N1 = x_ND.new_full(label_N1.shape, -torch.inf, dtype=accumulate_dtype(x_ND.dtype))
        hit_N1, sum_N1 = torch.zeros_like(lse_N1), torch.zeros_like(lse_N1)
        for part in _parts(len(w_VD), x_ND):
            z_NC = head.logits(x_ND, part)
            column_N1, inside_N1 = _within(label_N1, part)
            hit_N1 += torch.where(inside_N1, z_NC.gather(1, column_N1), 0.0)
            if smoothing:
                sum_N1 += z_NC.sum(1, keepdim=True)
            lse_N1 = torch.logaddexp(lse_N1, z_NC.logsumexp(1, keepdim=True))
        ctx.save_for_backward(x_ND, w_VD, b_V, label_N1, lse_N1, *plan.tensors())
        ctx.link_ids = links[::3]
        loss_N1 = lse_N1 - (1 - smoothing) * hit_N1 - smoothing / len(w_VD) * sum_N1
        loss_N1 = (loss_N1 + z_loss * lse_N1.square()).masked_fill(label_N1 < 0, 0.0)
        return loss_N1.masked_fill(label_N1 >= len(w_VD), torch.nan)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dloss_N1: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w_VD, b_V, label_N1, lse_N1, *saved = tensors
        link_ids, plan = ctx.link_ids, ctx.plan.restored(saved)
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        head = _Head(w_VD, b_V, x_ND.dtype, ctx.softcap)
        dloss_N1 = dloss_N1.masked_fill(label_N1 < 0, 0.0)
        dloss_N1 = dloss_N1.masked_fill(label_N1 >= len(w_VD), torch.nan)
        share_N1 = dloss_N1 * (1 + 2 * ctx.z_loss * lse_N1)
        flat_N1, hit_N1 = dloss_N1 * (ctx.smoothing / len(w_VD)), dloss_N1 * (1 - ctx.smoothing)
        tokens = _Tokens(label_N1, lse_N1, share_N1, flat_N1, hit_N1)
        dx = torch.zeros_like(x_ND, dtype=lse_N1.dtype) if need_x else None
        makes = not plan.norms_alone or bool(link_ids)  # links take rows of dW
        dw = torch.empty_like(w_VD) if need_w and makes else None
        db = torch.empty_like(b_V) if need_b and makes else None
        own = plan._replace(norms_alone=not makes)
        B: int | None = ctx.samples
        probe_rows, to_links = None, []
        if B is not None:
            shape = ctx.probe_shape
            probe_rows = x_ND.new_zeros(shape, dtype=torch.float64)
        splits = plan.uses is None or plan.uses.splits(plan)
        for part in _parts(len(w_VD), x_ND) if splits else [slice(0, len(w_VD))]:
            dz_NC = tokens.dlogits(head.logits(x_ND, part), part, ctx.softcap).to(x_ND.dtype)
            if dx is not None:
                w_CD = w_VD[part].to(x_ND.dtype)
                if dx.dtype == x_ND.dtype:
                    dx.addmm_(dz_NC, w_CD)
                else:
                    dx += dz_NC @ w_CD
            dw_CD, db_C, rows = _wgrad(x_ND, dz_NC, own, B, need_w, need_b, w_VD.dtype)
            for whole, piece in ((dw, dw_CD), (db, db_C)):
                if whole is not None:
                    whole[part] = piece
            if probe_rows is not None:
                probe_rows += rows
        if link_ids:
            assert dw is not None
            linked = torch.cat([_link_rows(head, tokens, x_ND, ids) for ids in link_ids], 1)
            to_links = link_grads(link_ids, linked, dw)
        if B is not None and probe_rows is not None:
            probe_rows[:, B + 1].clamp_(max=1.0)  # one call, however many parts
            probe_rows = probe_rows.to(torch.float32)
        dx = dx if dx is None else dx.to(x_ND.dtype)
        grads = plan.gradients((need_w, need_b), dw, db)
        return dx, *grads, probe_rows, *(None,) * 5, *to_links


def _room(like: Tensor) -> int:
    """How many logits may be in memory at a time."""
    return CHUNK if like.device.type == "cpu" else CHUNK * ON_GPU


def _parts(V: int, x_ND: Tensor) -> Iterator[slice]:
    """The words of each part: a multiple of 128, the width of a kernel's tile."""
    width = max(LEAST, _room(x_ND) // max(len(x_ND), 1) // 128 * 128)
    return (slice(start, min(start + width, V)) for start in range(0, V, width))


def _within(label_N1: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Each label's column in a part, and whether the label is in that part."""
    inside_N1 = (label_N1 >= part.start) & (label_N1 < part.stop)
    return (label_N1 - part.start).clamp(0, part.stop - part.start - 1), inside_N1


def _wgrad(
    x_ND: Tensor,
    dz_NC: Tensor,
    plan: Plan,
    B: int | None,
    weight: bool,
    bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """dW, db and the probe rows of a part. A gradient that nobody wants is empty; so are the rows
    if ``B`` is None.
    """
    none = x_ND.new_empty(0)
    if B is None:
        dw_CD = dz_NC.t() @ x_ND if weight else none
        return dw_CD, dz_NC.sum(0, dtype=accumulate_dtype(dz_NC.dtype)) if bias else none, none
    if not (weight or bias):
        return none, none, none.new_empty((0, B + 2))
    a = plan.linear_wgrad(plan.rows(x_ND, B), plan.rows(dz_NC, B), (weight, bias), dtype)
    return plan.run(ops.linear_wgrad, a, (weight, bias))[:3]


def _link_rows(head: _Head, tokens: _Tokens, x_ND: Tensor, ids_BS: Tensor) -> Tensor:
    """[B, S, D]: rows ``ids_BS`` of every sample's gradient of the head. The dlogits of those words
    are computed once more, some samples at a time.
    """
    (B, S), D, acc = ids_BS.shape, x_ND.shape[1], tokens.lse.dtype
    x_BTD = x_ND.view(B, len(x_ND) // B if B else 0, D)
    rows_BSD = x_ND.new_empty((B, S, D), dtype=acc)
    together = max(1, _room(x_ND) // max(1, S * max(x_BTD.shape[1], D)))
    of_samples = _Tokens(*(t.view(B, x_BTD.shape[1], 1) for t in tokens))
    for start in range(0, B, together):
        some = slice(start, start + together)
        x_GTD, ids_GS = x_BTD[some], ids_BS[some]
        group = _Tokens(*(t[some] for t in of_samples))
        dz_GTS = group.dlogits(head.logits(x_GTD, ids_GS), ids_GS, head.softcap).to(x_ND.dtype)
        rows_BSD[some] = dz_GTS.to(acc).mT @ x_GTD.to(acc)
    return rows_BSD


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    probe: Tensor | None = None,
    plan: Plan = PLAIN,
    links: tuple[Link, ...] = (),
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
) -> Tensor:
    """The cross entropy of a linear head, whose logits are never stored as a whole. Its backward
    fills ``probe``, if there is one.

    It equals ``F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2).float(), labels.flatten(),
    ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)``.

    Args:
        x: [B, ..., D], or [T, B, D] with ``plan.batch_dim`` 1. If there are k · B rows, k
            consecutive rows are one sample.
        weight: [V, D].
        labels: integers of the shape of ``x`` without its last dimension.
        bias: [V] or None.
        probe: float32 zeros [P, B + 2], where P is the number of trainable ones of (weight, bias).
        plan, links: as in ``linear``. With documents there are no links.
        ignore_index: the label of tokens without a loss.
        reduction: ``"mean"`` over all tokens that have a loss (NaN if there are none), ``"sum"``,
            or ``"none"``, which gives the shape of ``labels``, with 0 for ignored tokens.
        softcap: logits z become softcap · tanh(z / softcap).
        z_loss: adds z_loss · logsumexp² to each token's loss.
        shift: each position predicts the label of the next one. ``labels`` are then those of the
            input itself, [B, ..., T], as transformers' causal models take them.

    The loss is float32, or float64 for float64 inputs. The squared norms scale with it: a mean over
    n tokens scales them by 1 / n².

    Raises ValueError for a probe of another shape, and for labels of another shape, dtype or range.
    On a GPU and under ``torch.compile`` the range is not checked, because that would wait for the
    device. There a label out of range makes the loss and the gradients NaN.

    Source: the norms are those of ``linear``; parts of the vocabulary as in Wijmans et al. 2024
    (arXiv 2411.09009).

    >>> x, labels = torch.randn(3, 7, 5), torch.randint(0, 11, (3, 7))
    >>> w, probe = torch.randn(11, 5, requires_grad=True), torch.zeros(1, 3 + 2, requires_grad=True)
    >>> loss = gnsfast.functional.linear_cross_entropy(x, w, labels, probe=probe)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy((x @ w.T).flatten(0, 1),
    ...                                                        labels.flatten()))
    True
    >>> loss.backward()
    >>> probe.grad.shape
    torch.Size([1, 5])
    """
    if has_torch_function((weight, bias)):  # a parameter that is measured
        seen: Tensor = handle_torch_function(
            linear_cross_entropy,
            (weight, bias),
            x,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
            shift=shift,
        )
        return seen
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be a positive number or None, not {softcap}")
    dtype = autocast_dtype(x)
    if dtype is not None and x.is_floating_point():
        x = x.to(dtype)
    elif x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and weight {weight.dtype}. Outside of autocast, cast one of them."
        )
    label = _label(labels, x, len(weight), ignore_index)[..., None]
    if shift:
        label = _shifted(label, plan.batch_dim)
    rows = [t.reshape(-1, t.shape[-1]) for t in (x, label)]
    laid_out = probe is not None and plan.starts is None
    if probe is not None and laid_out:
        B = plan.samples(probe)
        rows = [samples_first(t, B, plan.batch_dim).flatten(0, 1) for t in (x, label)]
    x_ND, label_N1 = (t.contiguous() for t in rows)
    # From here on the rows are one list, sample after sample.
    listed = plan._replace(batch_dim=0)
    loss: Tensor = _LinearCrossEntropy.apply(
        *(x_ND, weight, bias, probe, listed, label_N1, softcap, label_smoothing, z_loss),
        *chain(*links),
    )
    if reduction == "none" and not laid_out:
        return loss.view(labels.shape)
    if reduction == "none":
        return plan.rows_back(loss.view(B, len(loss) // max(B, 1), 1), label)[..., 0]
    total = loss.sum()
    return total if reduction == "sum" else total / (label_N1 >= 0).sum()


def _label(labels: Tensor, x: Tensor, V: int, ignore_index: int) -> Tensor:
    """The labels as the loss takes them: -1 for an ignored label, V for one out of range."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, the indices of words, not {labels.dtype}")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels of shape {list(labels.shape)} do not fit an input of shape {list(x.shape)}: "
            "they must have the input's shape without its last dimension"
        )
    labels = labels.long()
    wrong = (labels < 0) | (labels >= V)
    label = labels.masked_fill(wrong, V).masked_fill(labels == ignore_index, -1)
    if label.device.type == "cpu" and not torch.compiler.is_compiling() and (label == V).any():
        raise ValueError(
            f"labels from {int(labels.min())} to {int(labels.max())} do not fit a weight of {V} "
            f"rows: they must be 0 to {V - 1}, or ignore_index ({ignore_index})"
        )
    return label


def _shifted(label: Tensor, batch_dim: int) -> Tensor:
    """Give each position the label of the next one. The last position has no label."""
    if label.ndim < 3:
        raise ValueError(
            "shift needs the tokens in a dimension of their own, not labels of shape "
            f"{list(label.shape[:-1])}. Shift the labels yourself, and give each sample's last "
            "token the label ignore_index."
        )
    dim = 0 if batch_dim == 1 else label.ndim - 2
    T = label.shape[dim]
    label = label.roll(-1, dim)
    label.narrow(dim, max(T - 1, 0), min(T, 1)).fill_(-1)
    return label

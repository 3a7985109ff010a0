# SPDX-License-Identifier: Apache-2.0
"""The drop-in for ``torch.nn.MultiheadAttention``."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.combinations import refuse, tensor_parallel
from gnsfast.errors import ObservationError
from gnsfast.layers.document_masks import (
    ATTEND_TO_EACH_OTHER,
    checked_probe,
    keeps_apart,
    refuse_attending,
)
from gnsfast.layers.drop_in import Converted, DropIn, ProbeRow, combine
from gnsfast.layers.linear import OutProjection

ATTENTION = (
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
)


class MultiheadAttention(DropIn, nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose backward can also yield per-sample squared gradient
    norms.

    Arguments and results are those of ``torch.nn.MultiheadAttention``. ``batch_first`` says which
    dimension holds the samples, regardless of the ``batch_dim`` of the rest of the model. The
    output projection is a ``gnsfast.Linear``.

    Raises:
        SampleShapeError: for a batch of another size, or an unbatched input with several samples.

    >>> layer = gnsfast.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(3, 7, 8)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(x, x, x)[0].sum().backward()
    >>> list(norms)
    ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """

    gnsfast = Converted("in_projection", ATTENTION)
    out_proj: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out_proj.__class__ = combine(type(self.out_proj), OutProjection, over=False)

    def probe_rows(self) -> list[ProbeRow]:
        """Query, key and value each have a row, even if one parameter holds all three."""
        rows = []
        for name in self.probed_parameters():
            if name not in ("in_proj_weight", "in_proj_bias"):
                part = name[-1] if name in ("bias_k", "bias_v") else name[0]
                rows.append(ProbeRow(name, part))
                continue
            for i, part in enumerate("qkv"):
                block = slice(i * self.embed_dim, (i + 1) * self.embed_dim)
                rows.append(ProbeRow(name, part, (block,)))
        return rows

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        # The output projection may be measured alone.
        module: DropIn = self if self.is_open else self.out_proj
        measured = isinstance(module, DropIn) and module._measuring() is not None
        if not measured or query.is_nested:
            return super().forward(
                *(query, key, value, key_padding_mask, need_weights),
                *(attn_mask, average_attn_weights, is_causal),
            )
        batched = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        self._check_shapes(query, key, value, module)
        separate = key_padding_mask is not None or (attn_mask is not None and not is_causal)
        self._check_samples(query, batched, module, separate)
        batch_dim = 0 if self.batch_first else 1
        if not batched:
            added = {id(t): t.unsqueeze(batch_dim) for t in (query, key, value)}
            query, key, value = (added[id(t)] for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal=True only says that attn_mask is causal, so it needs one: pass "
                "attn_mask=nn.Transformer.generate_square_subsequent_mask(length)"
            )
        masked = need_weights or key_padding_mask is not None
        bias_NHLS = self._attention_bias(
            query, key, key_padding_mask, attn_mask if masked or not is_causal else None
        )
        apart = None
        if module._measured.documents is not None:
            apart = _apart(module, query, key, bias_NHLS, batch_dim)
        q, k, v = self._project(query, key, value, batch_dim, apart)
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            o_NHLD, weights = _weighted(q, k, v, bias_NHLS, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            causal = is_causal and not masked
            o_NHLD = F.scaled_dot_product_attention(q, k, v, bias_NHLS, dropout, causal)
        # Tokens lie in memory as in torch, because a later dropout draws its mask in memory order.
        y = self._project_out(o_NHLD.permute(2, 0, 1, 3).flatten(2), apart)
        y = y.transpose(0, 1) if self.batch_first else y
        return (y if batched else y.squeeze(batch_dim)), weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor, module: DropIn) -> None:
        dim = 0 if self.batch_first else 1
        widths = tuple(t.shape[-1] for t in (query, key, value))
        same = key.shape[:-1] == value.shape[:-1]
        if query.ndim == 3:
            same &= key.shape[dim] == query.shape[dim]
        if not same or widths != (self.embed_dim, self.kdim, self.vdim):
            raise ValueError(
                f"{module._measured.name}: query {list(query.shape)}, key {list(key.shape)} and "
                f"value {list(value.shape)} do not fit together with embed_dim {self.embed_dim}, "
                f"kdim {self.kdim}, vdim {self.vdim} and batch_first={self.batch_first}"
            )

    def _check_samples(self, query: Tensor, batched: bool, module: DropIn, separate: bool) -> None:
        """Raise if the dimension that ``batch_first`` names does not hold the samples, or if
        documents cannot be kept apart by a mask (``separate``).
        """
        opened = module._measured
        name, B = opened.name, opened.samples
        refuse(module.gnsfast.route, tensor_parallel(query, self.out_proj.weight), name)
        if opened.documents is not None:
            if not separate:
                raise ObservationError(
                    f"{name}: without a mask, or with is_causal=True, {ATTEND_TO_EACH_OTHER}"
                )
            return
        if not batched:
            if B != 1:
                raise module._shape_error(query, "it has no batch dimension.")
            return
        dim = 0 if self.batch_first else 1
        rows = query.shape[dim]
        several = bool(B) and rows % B == 0
        if rows != B and not (several and self.gnsfast.layout.fold):
            found = f"batch_first={self.batch_first} says that dimension {dim} holds {rows}."
            if several:
                found += (
                    f" If every {rows // B} consecutive ones are one sample, call convert(model, "
                    f"fold=[{name!r}])."
                )
            raise module._shape_error(query, found)

    def _attention_bias(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> Tensor | None:
        """Both masks as one term of the logits, [N or 1, H or 1, L or 1, S]."""
        dims = (0, 1) if self.batch_first else (1, 0)
        (N, L), S = (query.shape[d] for d in dims), key.shape[dims[1]]
        other = F._none_or_dtype(attn_mask)
        padding = F._canonical_mask(
            key_padding_mask, "key_padding_mask", other, "attn_mask", query.dtype
        )
        bias = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
        if bias is not None:
            wanted = (L, S) if bias.ndim == 2 else (N * self.num_heads, L, S)
            if bias.shape != wanted:
                raise RuntimeError(
                    f"attn_mask must have shape {list(wanted)}, not {list(bias.shape)}"
                )
            bias = bias.view(-1, self.num_heads if bias.ndim == 3 else 1, L, S)
        if padding is not None:
            if padding.shape != (N, S):
                raise RuntimeError(
                    f"key_padding_mask must have shape {[N, S]}, not {list(padding.shape)}"
                )
            padding = padding.view(N, 1, 1, S)
            bias = padding if bias is None else bias + padding
        appended = (self.bias_k is not None) + self.add_zero_attn
        return bias if bias is None else F.pad(bias, (0, appended))

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim: int, apart: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Queries [N, H, L, D], keys and values [N, H, S, D], with ``bias_k`` and ``bias_v``
        appended.
        """
        packed, bias = self.in_proj_weight, self.in_proj_bias
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        named = [row.parameter for row in self.probe_rows()]
        own = [name for name in named if name not in ("bias_k", "bias_v")]
        if self._opened is None or not own:
            blocks = weights if packed is None else packed.chunk(3)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projected = zip((query, key, value), blocks, biases)
            q, k, v = (F.linear(t, w, b) for t, w, b in projected)
        else:
            q, k, v = functional.in_projection(
                *(query, key, value, weights if packed is None else packed, bias),
                checked_probe(self._opened.probe[: len(own)], self._opened.samples, apart),
                self._plan(query, key, batch_dim),
            )
        if self.bias_k is not None:
            rows = query.shape[batch_dim]
            k, v = (
                torch.cat([t, self._appended(name, named, rows, batch_dim)], dim=1 - batch_dim)
                for name, t in (("bias_k", k), ("bias_v", v))
            )
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        heads = (self.num_heads, self.head_dim)
        return tuple(t.unflatten(-1, heads).permute(order) for t in (q, k, v))

    def _plan(self, query: Tensor, key: Tensor, batch_dim: int) -> functional.Plan:
        if self._measured.documents is None:
            return functional.Plan(batch_dim=batch_dim)
        name = self._measured.name
        if not {"bias_k", "bias_v"}.isdisjoint(self.probed_parameters()):
            raise NotImplementedError(
                f"{name}: all documents of a row see its one bias_k and bias_v, which have no "
                "norms for documents of packed rows (cu_seqlens). Leave the module out: "
                f"convert(model, exclude=[{name!r}])."
            )
        return functional.Plan(starts=self._starts(query, 1, batch_dim))

    def _appended(self, name: str, named: list[str], rows: int, batch_dim: int) -> Tensor:
        """``bias_k`` or ``bias_v`` for each of ``rows`` rows of the batch. ``named`` holds the
        parameter of each probe row.
        """
        parameter: Tensor = getattr(self, name)
        if self._opened is None or name not in named:
            return parameter.expand((1, rows, -1) if batch_dim else (rows, 1, -1))
        row = named.index(name)
        # An embedding with one word, looked up once for each row.
        ids = parameter.new_zeros((1, rows) if batch_dim else (rows, 1), dtype=torch.int64)
        probe, plan = self._opened.probe[row : row + 1], functional.Plan(batch_dim=batch_dim)
        return functional.embedding(ids, parameter[0], probe, plan)[0]

    def _project_out(self, o_LNE: Tensor, apart: Tensor | None) -> Tensor:
        weight, bias = self.out_proj.weight, self.out_proj.bias
        opened = getattr(self.out_proj, "_opened", None)
        if opened is None:
            return F.linear(o_LNE, weight, bias)
        plan, o = functional.Plan(batch_dim=1), o_LNE
        if packed := opened.documents is not None:  # their rows are one list, row by row
            o = o_LNE.transpose(0, 1)
            plan = functional.Plan(starts=self.out_proj._starts(o, 1, 0))
        probe = checked_probe(opened.probe, opened.samples, apart)
        y = functional.linear(o, weight, bias, probe, plan)
        return y.transpose(0, 1) if packed else y


def _apart(
    module: DropIn, query: Tensor, key: Tensor, bias_NHLS: Tensor | None, batch_dim: int
) -> Tensor | None:
    """Raise if the mask lets documents see each other. On a GPU return whether it does not."""
    assert bias_NHLS is not None
    starts = module._starts(query, 1, batch_dim)
    module._starts(key, 1, batch_dim)  # keys are the same documents
    S, rows = key.shape[1 - batch_dim], query.shape[batch_dim]
    return refuse_attending(module._measured.name, keeps_apart(bias_NHLS[..., :S], starts, rows))


def _weighted(
    q_NHLD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """The attention's output and its weights [N, H, L, S], by the same products as torch with
    ``need_weights``.
    """
    (N, H, L, D), S = q_NHLD.shape, k_NHSD.shape[2]
    q, k, v = (t.flatten(0, 1) for t in (q_NHLD, k_NHSD, v_NHSD))
    q = q * math.sqrt(1.0 / D)
    if bias is None:
        logits = torch.bmm(q, k.mT)
    else:
        logits = torch.baddbmm(bias.expand(N, H, L, S).reshape(N * H, L, S), q, k.mT)
    weights = F.softmax(logits, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.bmm(weights, v).view(N, H, L, D), weights.view(N, H, L, S)

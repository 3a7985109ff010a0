# SPDX-License-Identifier: Apache-2.0
"""Operators that run on one group of samples (data domain, cluster) after the other.

Each is an operator of its own, with shapes that do not tell how many samples a group has. So one
graph of ``torch.compile`` serves all batches of B samples.

Legend: B samples, G groups, S ids of links, P parameters of a module.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.ops import operators
from gnsfast.reference import sqnorm
from gnsfast.signatures import BY_SAMPLE, OPERATORS, RESULTS, EmbeddingWgrad, empty_rows, schema
from gnsfast.tensors import accumulate_dtype


class Groups(NamedTuple):
    """The samples of G groups. Each sample is in one of them.

    ``order_B`` holds the first group's samples, then the second's, and so on, on the device of the
    layer. ``sizes_G`` says how many each has, on the CPU.

    >>> gnsfast.functional.Groups.of(torch.tensor([2, 0]), torch.tensor([1])).sizes_G
    tensor([2, 1])
    """

    order_B: Tensor
    sizes_G: Tensor

    @classmethod
    def of(cls, *members: Tensor) -> "Groups":
        """Groups from the samples of each of them."""
        return cls(torch.cat(members), torch.tensor([len(index) for index in members]))

    def members(self) -> tuple[Tensor, ...]:
        """The samples of each group."""
        refuse_capture()
        members: tuple[Tensor, ...] = self.order_B.split(self.sizes_G.tolist())
        return members

    def to(self, device: torch.device) -> "Groups":
        refuse_capture()
        return self._replace(order_B=self.order_B.to(device, non_blocking=True))

    def sums(self, t_B: Tensor) -> Tensor:
        """[G]: the sum of each group's samples, always in the same order, as a graph of static
        shapes.
        """
        refuse_capture()
        device, G = t_B.device, len(self.sizes_G)
        ends_G = self.sizes_G.to(device, non_blocking=True).cumsum(0)
        group_B = torch.bucketize(torch.arange(len(t_B), device=device), ends_G, right=True)
        own_GB = group_B == torch.arange(G, device=device)[:, None]
        return torch.where(own_GB, t_B[self.order_B], 0.0).sum(1)


def refuse_capture() -> None:
    """Raise while a CUDA graph is captured: a replay would take the groups' sizes, which the CPU
    reads, from the batch that was captured. Where ``torch.compile`` captures, it leaves out what
    reads the CPU.
    """
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "GradientNoiseScale(groups=[...]) cannot be captured in a CUDA graph, nor can "
            "gns.update(clusters=...), because the CPU reads how many samples each has: run "
            "measured updates without a graph, or leave groups and clusters out."
        )


def by_group(
    a: Any, groups: Groups, wanted: Sequence[bool], at_BS: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The results of an operator in ``BY_SAMPLE``. The probe rows [P, B + 2 + G] have columns for
    the groups' sums. The last result holds rows ``at_BS`` of the weight gradient of each sample's
    own group, [B, S, features], and is empty without ``at_BS``. Documents have no ``at_BS``.
    """
    results: tuple[Tensor, ...] = _GROUPED[type(a)](*groups, at_BS, list(wanted), *a)
    return results


def _registered(name: str) -> Callable[..., tuple[Tensor, ...]]:
    signature: Any = OPERATORS[name]
    groups_schema = "Tensor order_B, Tensor sizes_G, Tensor? at_BS, bool[] wanted, "
    whole = (
        schema(name).replace(f"{name}(", f"{name}_by_group({groups_schema}", 1)[:-1] + ", Tensor)"
    )
    operators.library.define(whole, tags=(torch.Tag.pt2_compliant_tag,))

    def fake(
        order_B: Tensor, sizes_G: Tensor, at_BS: Tensor | None, wanted: list[bool], *fields: Any
    ) -> tuple[Tensor, ...]:
        a = signature(*fields)
        results, B = list(a.results()), len(order_B)
        k, width = RESULTS[name].index("rows"), results[0].shape[-1]
        results[k] = empty_rows(a[0], len(results[k]), B + len(sizes_G))
        shape = (0,) if at_BS is None else (*at_BS.shape, width)
        return *results, a[0].new_empty(shape, dtype=accumulate_dtype(a[0].dtype))

    def run(
        order_B: Tensor, sizes_G: Tensor, at_BS: Tensor | None, wanted: list[bool], *fields: Any
    ) -> tuple[Tensor, ...]:
        operator, a, groups = getattr(operators, name), signature(*fields), Groups(order_B, sizes_G)
        if a.starts is not None:
            return _of_segments(operator, a, groups)
        return _by_group(operator, a, groups.members(), wanted, at_BS)

    operators.library.impl(f"{name}_by_group", run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnsfast::{name}_by_group", fake, lib=operators.library)
    return getattr(torch.ops.gnsfast, f"{name}_by_group").default  # type: ignore[no-any-return]


def _by_group(
    operator: Callable[[Any], tuple[Tensor, ...]],
    a: Any,
    members: tuple[Tensor, ...],
    wanted: list[bool],
    at_BS: Tensor | None,
) -> tuple[Tensor, ...]:
    """Call the operator once for each group, on its samples, and add up the groups' gradients in
    the accumulation dtype. No product is computed twice.
    """
    like, inputs, kinds = a[0], *BY_SAMPLE[type(a)]
    acc, linked = accumulate_dtype(like.dtype), getattr(a, "ids_BS", None) is not None
    dtype = getattr(a, "dtype", None)
    if dtype is not None:
        a = a._replace(dtype=acc)
    parts: list[list[Tensor]] = []
    at_part: list[Tensor] = []
    for index in members:
        part = type(a)(*(t if t is None else t[index] for t in a[:inputs]), *a[inputs:])
        if linked:
            part = part._replace(ids_BS=a.ids_BS[index])
        results = operator(part)
        if at_BS is not None:
            at_part.append(results[0][at_BS[index]])
        if not parts:
            dtypes = [dtype or t.dtype for t in results]
            parts = [[t.to(acc) if kind == "sum" else t] for t, kind in zip(results, kinds)]
            continue
        for t, of_result, kind in zip(results, parts, kinds):
            if kind == "sum":  # one at a time: a weight's gradient may be large
                of_result[0] += t
            else:
                of_result.append(t)
    sums = [of_result[0] for of_result, kind in zip(parts, kinds) if kind == "sum"]
    totals = [sqnorm(t) for t in compress(sums, wanted)]
    whole: list[Tensor] = []
    for of_result, kind, kept in zip(parts, kinds, dtypes):
        if kind == "sum":
            whole.append(of_result[0].to(kept))
        elif kind == "rows":
            whole.append(_rows(of_result, members, totals))
        else:
            whole.append(_in_order(of_result, members))
    return *whole, _in_order(at_part or [like.new_empty(0, dtype=acc)], members)


def _of_segments(
    operator: Callable[[Any], tuple[Tensor, ...]], a: Any, groups: Groups
) -> tuple[Tensor, ...]:
    """Call the operator for the documents, then for the groups, as if each were one document: its
    products are computed twice.
    """
    refuse_capture()
    inputs, kinds = BY_SAMPLE[type(a)]
    results, at = list(operator(a)), kinds.index("rows")
    length_B = a.starts.diff()[groups.order_B]
    ends_B = length_B.cumsum(0)
    first_B = a.starts[:-1][groups.order_B] - ends_B + length_B
    tokens_dim = 1 if isinstance(a, EmbeddingWgrad) else 0
    N = a[0].shape[tokens_dim]
    row_N = first_B.repeat_interleave(length_B, output_size=N)
    row_N += torch.arange(N, device=row_N.device)
    tensors = (t if t is None else t.index_select(tokens_dim, row_N) for t in a[:inputs])
    ends_G = groups.sizes_G.to(ends_B.device, non_blocking=True).cumsum(0)
    starts = F.pad(F.pad(ends_B, (1, 0))[ends_G], (1, 0)).to(a.starts.dtype)
    of_groups = operator(type(a)(*tensors, *a[inputs:])._replace(starts=starts))[at]
    results[at] = torch.cat([results[at], of_groups[:, :-2]], 1)
    return *results, a[0].new_empty(0, dtype=accumulate_dtype(a[0].dtype))


def _in_order(parts: list[Tensor], members: tuple[Tensor, ...]) -> Tensor:
    """The groups' samples in the order of the batch. An unwanted result stays empty."""
    if parts[0].ndim == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(map(len, members)), *parts[0].shape[1:])
    for index, part in zip(members, parts):
        whole[index] = part
    return whole


def _rows(parts: list[Tensor], members: tuple[Tensor, ...], totals: list[Tensor]) -> Tensor:
    """The probe rows of the whole batch, with a column for the sum of each group."""
    B = sum(map(len, members))
    rows = parts[0].new_ones(len(parts[0]), B + 2 + len(parts))
    for g, (index, part) in enumerate(zip(members, parts)):
        rows[:, index], rows[:, B + 2 + g] = part[:, :-2], part[:, -2]
    rows[:, B] = torch.stack(totals)
    return rows


_GROUPED = {
    OPERATORS[name]: _registered(name) for name in OPERATORS if OPERATORS[name] in BY_SAMPLE
}

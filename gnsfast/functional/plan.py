# SPDX-License-Identifier: Apache-2.0
"""The plan of a layer: which rows of its input belong to which sample, and what is measured."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import combinations
from gnsfast.ops import Groups, by_group, norms_alone
from gnsfast.signatures import LinearWgrad
from gnsfast.tensors import is_dtensor

Operator = Callable[[Any], tuple[Tensor, ...]]


class Plan(NamedTuple):
    """Which rows of a layer's input belong to which sample, and what is measured.

    Its probe is float32 zeros [P, B + 2 + G]. There is a row for each of the P trainable parameters
    of the layer, in the order weight, bias. The columns are the B samples, their sum, the calls,
    then the sums of G groups of samples.

    Args:
        batch_dim: the dimension of the input that holds the samples, 0 or 1. With 1 an input of two
            dimensions is a flattened [T, B, features].
        transposed: whether the weight of a linear layer is stored as [in_features, out_features].
        starts: [B + 1], if samples are documents. All rows are one list, and document b has the
            rows ``starts[b]`` to ``starts[b + 1]`` (FlashAttention's ``cu_seqlens``). Every row
            belongs to a document.
        experts: the number of experts. ``starts`` is then [experts · B + 1], with the rows of each
            expert, sample by sample.
        groups: the samples (or documents) of each of G groups. Each sample is in one group.
        module: the layer's name in messages.
        uses: decides in backward whether the rows are the norms of the parameters, or a part that
            is joined with other uses of them.
        norms_alone: whether torch's own function gives the output and all gradients, and the layer
            the norms alone. Its output is then a stand-in without memory (``beside``).

    >>> x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    >>> groups = gnsfast.functional.Groups.of(torch.tensor([0, 2]), torch.tensor([1]))
    >>> plan = gnsfast.functional.Plan(groups=groups)
    >>> probe = torch.zeros(1, 3 + 2 + 2, requires_grad=True)
    >>> gnsfast.functional.linear(x, w, None, probe, plan).sum().backward()
    >>> torch.allclose(probe.grad[0, 5], 2 * (x[0] + x[2]).square().sum())
    True
    """

    batch_dim: int = 0
    transposed: bool = False
    starts: Tensor | None = None
    experts: int = 0
    groups: Groups | None = None
    module: str | None = None
    uses: Any = None
    norms_alone: bool = False

    def samples(self, probe: Tensor) -> int:
        """B, from a probe. If the plan held B, torch.compile would build a graph for each B."""
        return probe.shape[1] - 2 - (0 if self.groups is None else len(self.groups.sizes_G))

    def check(
        self,
        layer: str,
        probe: Tensor,
        parameters: int,
        weight: Tensor | None = None,
        tied: bool = False,
    ) -> None:
        """Raise for a probe of another shape, for groups that do not hold each sample once, and for
        features that cannot be measured together (``combinations``).
        """
        if self.uses is not None and self.is_plain:
            return  # it was made for these parameters
        if probe.ndim != 2 or probe.shape[0] != parameters or probe.dtype != torch.float32:
            raise ValueError(
                f"probe must be float32 [{parameters}, B + 2], with a row for each trainable "
                f"parameter, not {probe.dtype} {list(probe.shape)}"
            )
        simple = self.is_plain and not (tied or self.experts or self.transposed)
        if simple and not is_dtensor(weight):
            return
        limited = tied or is_dtensor(weight) or not self.is_plain
        if limited and (self.uses is None or tied):
            features = self.features(layer, is_dtensor(weight), tied, probe.is_cuda)
            combinations.refuse(features, layer, self.module)
        if self.starts is not None and self.batch_dim != 0:
            raise ValueError(
                "documents (starts) need batch_dim=0, because they lie one after the other"
            )
        if (self.experts and layer != "experts") or (self.transposed and layer not in FLAT):
            raise ValueError(f"{layer} takes neither experts nor a transposed weight")
        if self.groups is not None and len(self.groups.order_B) != self.samples(probe):
            raise ValueError(
                f"groups must hold each of the {self.samples(probe)} samples of the probe once, "
                f"not {len(self.groups.order_B)} samples"
            )

    def features(self, layer: str, tensor_parallel: bool, tied: bool, cuda: bool) -> list[str]:
        """The features of ``combinations`` that a call of ``layer`` asks for."""
        asked = {
            combinations.DOCUMENTS: self.starts is not None and layer != "experts",
            combinations.GROUPS: self.groups is not None,
            combinations.TIED: tied,
            combinations.TENSOR_PARALLEL: tensor_parallel,
            combinations.COMPILED: torch.compiler.is_compiling(),
            combinations.CUDA: cuda,
        }
        return [feature for feature, is_asked in asked.items() if is_asked]

    @property
    def is_plain(self) -> bool:
        """Whether the plan holds no tensors."""
        return self.starts is None and self.groups is None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, for ``save_for_backward``, which lets autograd notice writes to them."""
        if self.is_plain:
            return ()
        return self.starts, *(self.groups or ())

    def without_tensors(self) -> "Plan":
        """The plan without its tensors, which ``ctx`` may keep. ``restored`` puts them back."""
        if self.is_plain:
            return self
        return self.restored((None,) * len(self.tensors()))

    def restored(self, saved: Sequence[Tensor | None]) -> "Plan":
        """The reverse of ``tensors`` and ``without_tensors``."""
        if not saved:
            return self
        starts, *groups = saved
        return self._replace(starts=starts, groups=Groups._make(groups) if groups else None)

    def of(self, k: int) -> "Plan":
        """The plan of parameter number ``k`` alone."""
        return self._replace(uses=self.uses and self.uses.of(k))

    def gradients(
        self, wanted: Sequence[bool], dw: Tensor | None, db: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Those of weight and bias that are ``wanted`` of the layer: none if torch gives them."""
        if self.norms_alone:
            return None, None
        return dw if wanted[0] else None, db if wanted[1] else None

    def rows(self, t: Tensor, B: int) -> Tensor:
        """``t`` as [B, T, features], or for documents as one list [N, features]."""
        if self.starts is not None:
            return t.flatten(0, -2) if t.ndim > 2 else t
        return samples_first(t, B, self.batch_dim)

    def rows_back(self, t: Tensor, like: Tensor) -> Tensor:
        """The reverse of ``rows``: ``t`` in the shape of ``like``, in which it came."""
        if self.batch_dim == 0:
            return t.reshape_as(like)
        if like.ndim == 2:
            return t.transpose(0, 1).reshape_as(like)
        return t.reshape(like.shape[1], like.shape[0], *like.shape[2:]).transpose(0, 1)

    def linear_wgrad(
        self,
        x: Tensor,
        dy: Tensor,
        wanted: Sequence[bool],
        dtype: torch.dtype,
        ids_BS: Tensor | None = None,
    ) -> LinearWgrad:
        """The arguments of a linear layer's operator."""
        weight, bias = wanted
        flags = weight, bias, self.transposed, dtype
        return LinearWgrad(x, dy, *flags, self.starts, self.experts, ids_BS)

    def run(
        self,
        operator: Operator,
        a: Any,
        wanted: Sequence[bool],
        at_BS: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """``operator(a)``, at once or group by group. ``wanted`` says which gradients are needed.
        With groups one more result holds rows ``at_BS`` of the weight gradient of each sample's
        group.
        """
        if self.uses is not None:
            joined: tuple[Tensor, ...] = self.uses.keep(self, operator, a, wanted, at_BS)
            return joined
        if self.groups is None:
            alone = self.norms_alone and at_BS is None
            return norms_alone(operator, a) if alone else operator(a)
        results = by_group(a, self.groups, wanted, at_BS)
        return results[:-1] if at_BS is None else results


FLAT = ("linear", "experts")
"""Layers whose weight may be stored transposed."""

PLAIN = Plan()
"""Samples lie along dimension 0, and only their norms are measured."""


def samples_first(x: Tensor, B: int, batch_dim: int) -> Tensor:
    """``x`` as [B, T, features]. If there are k · B rows, k consecutive rows become one sample, or
    with ``batch_dim`` 1 the rows that are B apart, as in a flattened [T, B, features].
    """
    if batch_dim == 1:
        if x.ndim == 2 and B and len(x) % B == 0:
            x = x.unflatten(0, (-1, B))
        x = x.transpose(0, 1) if x.ndim > 2 else x
    shape = x.shape
    if shape[0] == B and len(shape) < 4:
        return x if len(shape) == 3 else x.unsqueeze(1)
    rows = shape[:-1].numel()
    T = rows // B if B else 0
    if T * B != rows:
        raise ValueError(f"{rows} rows of an input of shape {list(shape)} are not {B} samples")
    return x.reshape(B, T, shape[-1])

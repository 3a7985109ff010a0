# SPDX-License-Identifier: Apache-2.0
"""What every drop-in module has: a slot for a probe, a sample layout, pickling, ties."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.functional import Documents, Groups, Link, Metric, num_samples


@dataclass(frozen=True)
class SampleLayout:
    """Where a module finds its samples.

    ``batch_dim`` is the dimension that holds them; ``fold`` declares that k · B rows are B samples
    of k consecutive rows; ``broadcast`` declares an index without a batch dimension that all
    samples share. ``flattened``: its rows [N, features] are known to be those of a batch, in their
    order.
    """

    batch_dim: int = 0
    fold: bool = False
    broadcast: bool = False
    flattened: bool = False


class ProbeRow(NamedTuple):
    """A row of a module's probe: a parameter, or a block of one that is looked at by itself.

    ``part`` is what the block is called, ``block`` where it lies in the parameter.
    """

    parameter: str
    part: str = ""
    block: tuple[slice, ...] = ()


class Tie:
    """A weight shared by embeddings and at most one linear head; carries the links between its
    uses.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the uses of a forward pass that is over."""
        self.uses: tuple[Link, ...] = ()
        self.crossed = False

    def take(self, name: str) -> tuple[Link, ...]:
        """The links to the embeddings used so far; the head, which comes last, takes them away."""
        links, self.uses = self.uses, ()
        if links:
            self.crossed = True
        elif self.crossed and not torch.compiler.is_compiling() and _in_backward():
            raise ObservationError(
                f"{name}: this tied head is recomputed in backward (activation checkpointing) "
                "without its embedding, so the two cannot be told apart from each other. "
                "Checkpoint both or neither, or leave the pair out: convert(model, "
                f"exclude=[{name!r}, ...])."
            )
        return links

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reset()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Probed(nn.Module):
    """Mixin of a drop-in module: plain ``torch.nn`` until a probe is opened on it.

    Nothing here is a parameter or a buffer, so ``state_dict`` stays that of the torch class.
    """

    route = ""
    _probe: Tensor | None = None
    _probe_name = ""
    _metric: Metric | None = None
    _groups: Groups | None = None
    takes_metric = False  # whether its forward hands a metric, and groups, on
    _samples = SampleLayout()
    _documents: Documents | None = None
    _takes_documents = False
    _tie: Tie | None = None
    _claims: tuple[str, ...] = ("weight", "bias")
    _uncovered: dict[str, str] = {}
    _calls: int | None = None
    _audited = False

    def claimed_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this module answers for, by their names below it."""
        own = dict(self.named_parameters())
        return {n: own[n] for n in self._claims if n in own}

    def probed_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable ones of them: each has a probe row, in this order."""
        return {n: p for n, p in self.claimed_parameters().items() if p.requires_grad}

    def probe_rows(self) -> list[ProbeRow]:
        """The rows of a probe: the trainable parameters, or their blocks."""
        return [ProbeRow(name) for name in self.probed_parameters()]

    def open_probe(self, probe: Tensor, name: str, documents: Documents | None = None) -> None:
        """Let the next forward pass fill ``probe``; ``name`` is the module's in error messages."""
        self._probe, self._probe_name, self._documents = probe, name, documents
        if self._tie is not None:
            self._tie.reset()

    def close_probe(self) -> None:
        """Be a plain torch module again."""
        self._probe = None
        if self._metric is not None:
            self._metric = None
        if self._groups is not None:
            self._groups = None
        if self._tie is not None:
            self._tie.reset()

    def _starts(self, x: Tensor, features: int) -> Tensor | None:
        """Where documents begin in the rows of ``x``, if they are the samples. Dimensions after
        those of the tokens (heads) make several rows of each.
        """
        if self._documents is None:
            return None
        starts, tokens = self._documents
        leading = x.shape[: x.ndim - features]
        if self._samples.batch_dim == 1 and len(leading) > 1 and leading[1] != 1:
            raise SampleShapeError(
                f"{self._probe_name} ({type(self).__name__}): an input of shape {list(x.shape)}, "
                "sequence first, has the tokens of its rows interleaved: documents (cu_seqlens) "
                "need one row there"
            )
        for k in range(1, len(leading) + 1):
            if leading[:k].numel() == tokens:
                return starts * leading[k:].numel()
        raise SampleShapeError(
            f"{self._probe_name} ({type(self).__name__}): cu_seqlens ends at token {tokens}, but "
            f"an input of shape {list(x.shape)} has no leading dimensions of that size. Where "
            "padding follows, say so by a last document; else leave the module out: "
            f"convert(model, exclude=[{self._probe_name!r}])."
        )

    def _open(self) -> bool:
        return self._probe is not None and torch.is_grad_enabled()

    def _batch_dim(self, x: Tensor, features: int) -> int:
        """The dimension of ``x`` that holds the samples, checked; its last ``features`` dimensions
        hold none.
        """
        assert self._probe is not None
        B, layout = num_samples(self._probe), self._samples
        leading = x.shape[: x.ndim - features]
        if self._documents is not None:
            return 0
        if not leading:
            if B == 1:
                return 0
            hint = ""
            if isinstance(self, nn.Embedding):
                hint = (
                    " If all samples share this index, say convert(model, "
                    f"broadcast=[{self._probe_name!r}])."
                )
            raise self._shape_error(x, f"it has no batch dimension.{hint}")
        dim = layout.batch_dim if len(leading) > layout.batch_dim else 0
        rows = leading[dim]
        if rows == B or (layout.fold and dim == 0 and B and rows % B == 0):
            return dim
        hint = ""
        if B and rows % B == 0 and dim == 0:
            hint = (
                f" If every {rows // B} consecutive rows are one sample, say convert(model, "
                f"fold=[{self._probe_name!r}])."
            )
        elif B in leading:
            found = leading.index(B)
            hint = (
                f" If the model holds its samples along dimension {found}, say "
                f"convert(model, batch_dim={found})."
            )
        raise self._shape_error(x, f"dimension {dim} has {rows} rows.{hint}")

    def _shape_error(self, x: Tensor, found: str) -> SampleShapeError:
        assert self._probe is not None
        return SampleShapeError(
            f"{self._probe_name} ({type(self).__name__}): expected {num_samples(self._probe)} "
            f"samples in an input of shape {list(x.shape)}, but {found} Check num_samples, or "
            f"leave the module out: convert(model, exclude=[{self._probe_name!r}])."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        recipe = type(self).__dict__.get("_recipe")
        make, args = (_new, (type(self),)) if recipe is None else (_new_combined, recipe)
        # object has a __getstate__ of its own from Python 3.11 on: only a user's counts.
        own = any("__getstate__" in vars(c) for c in type(self).__mro__ if c is not object)
        state = self.__getstate__() if own else self.__dict__  # type: ignore[no-untyped-call]
        return (
            make,
            args,
            {**state, "_probe": None, "_documents": None, "_metric": None, "_groups": None}
            if isinstance(state, dict)
            else state,
        )


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


_combined: dict[tuple[type, type, bool], type] = {}


def combine(cls: type, probed: type, over: bool) -> type:
    """A subclass of the user's ``cls`` with the forward of ``probed``.

    ``over``: it replaces the forward of ``cls``; otherwise it stands below, where
    ``super().forward`` arrives.
    """
    key = (cls, probed, over)
    if key not in _combined:
        bases = (probed, cls) if over else (cls, probed)
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_recipe": key,
        }
        _combined[key] = type(cls.__name__, bases, body)
    return _combined[key]


def _new_combined(cls: type, probed: type, over: bool) -> Any:
    return _new(combine(cls, probed, over))

# SPDX-License-Identifier: Apache-2.0
"""The base of every drop-in: a place for a probe, the layout of its samples, and pickling."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.combinations import REPEATED, TIED
from gnsfast.errors import SampleShapeError
from gnsfast.functional import Documents, Plan
from gnsfast.layers.tie import Tie


class SampleLayout(NamedTuple):
    """Where a module finds its samples.

    ``batch_dim`` is the dimension that holds them. ``fold``: k · B rows are B samples of k
    consecutive rows. ``broadcast``: all samples share an index without a batch dimension.
    ``flattened``: the rows [N, features] are known to be those of a batch, in their order. With
    ``batch_dim`` 1 the B samples alternate. ``known``: an example has shown the layout.
    """

    batch_dim: int = 0
    fold: bool = False
    broadcast: bool = False
    flattened: bool = False
    known: bool = False


class Setting(NamedTuple):
    """An attribute that decides a branch of a module's own forward, and its value; with a ``kind``
    whether it is an instance of that class.
    """

    name: str
    kind: type | None
    value: Any


class Converted(NamedTuple):
    """The decisions of ``convert`` about a module, and the findings of later passes.

    ``route`` is the layer's name in ``combinations.LAYERS``, which every drop-in class sets.
    ``claims`` are the parameters that the module is responsible for, and ``uncovered`` says why
    some of them have no norms. ``repeated``: the model calls the module several times in a pass, so
    its calls are joined. ``calls`` counts its backward calls in the last pass. ``audited``: its
    gradients were compared with what arrived at the parameters. ``half``: it was replayed under
    autocast, or casts its parameters, so torch rounds its gradients to half precision. ``note``:
    what an example has shown. ``shared``: the places of the arguments that all samples of a
    replayed module share. ``steps``: how it uses copies of its parameters (``functional.Use``).
    ``settings``: what decides the branches of its own forward.
    """

    route: str = ""
    claims: tuple[str, ...] = ("weight", "bias")
    layout: SampleLayout = SampleLayout()
    uncovered: dict[str, str] = {}
    tie: Tie | None = None
    repeated: bool = False
    calls: int | None = None
    audited: bool = False
    half: bool = False
    note: str = ""
    shared: frozenset[int] = frozenset()
    steps: tuple[tuple[Any, str], ...] = ()
    settings: tuple[Setting, ...] = ()

    @property
    def decided(self) -> tuple[Any, ...]:
        """The decisions of ``convert``, without the findings of passes."""
        return self[:6]

    def features(self, *asked: str) -> list[str]:
        """The features ``asked`` for, and those that the module itself adds."""
        own = {TIED: self.tie is not None, REPEATED: self.repeated}
        return [*asked, *(feature for feature, has in own.items() if has)]


class Opened(NamedTuple):
    """What a module measures while its probe is open. ``name`` is its name in messages. ``plan`` is
    for inputs whose samples lie along dimension 0.
    """

    probe: Tensor
    name: str
    samples: int
    plan: Plan
    documents: Documents | None = None

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a module measures nothing. Torch copies a parametrized module by copying its
        attributes, this one among them.
        """


class ProbeRow(NamedTuple):
    """A row of a module's probe, for a parameter or for a block of one.

    ``part`` is the name of the block, and ``block`` its place in the parameter.
    """

    parameter: str
    part: str = ""
    block: tuple[slice, ...] = ()


class DropIn(nn.Module):
    """Mixin of every drop-in module. The module is plain ``torch.nn`` until a probe is opened.

    It adds neither parameters nor buffers, so ``state_dict`` stays that of the torch class. It has
    only two attributes, so that they do not clash with those of a user's class.
    """

    gnsfast = Converted()
    _opened: Opened | None = None

    def know(self, **facts: Any) -> None:
        """Replace some fields of ``Converted``."""
        self.__dict__["gnsfast"] = self.gnsfast._replace(**facts)

    def called(self, count: float) -> None:
        """Note the number of calls in a pass. NaN stands for calls that gave no norms."""
        calls = None if count != count else int(count)
        if calls != self.gnsfast.calls:
            self.know(calls=calls)

    def claimed_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this module is responsible for, by their names in it."""
        own = dict(self.named_parameters())
        return {n: own[n] for n in self.gnsfast.claims if n in own}

    def probed_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable ones of ``claimed_parameters``, in the order of their probe rows."""
        return {n: p for n, p in self.claimed_parameters().items() if p.requires_grad}

    def probe_rows(self) -> list[ProbeRow]:
        """The rows of a probe: the trainable parameters, or their blocks."""
        return [ProbeRow(name) for name in self.probed_parameters()]

    def open_probe(self, opened: Opened) -> None:
        """Let the next forward pass fill the probe."""
        own = self.__dict__  # this avoids nn.Module.__setattr__, which takes 5 µs
        own["_opened"] = opened
        # The instance gets its own, since a compiled graph must not depend on who has set it.
        own.setdefault("gnsfast", self.gnsfast)

    def close_probe(self) -> None:
        """Become a plain torch module again."""
        self.__dict__["_opened"] = None

    @property
    def is_open(self) -> bool:
        """Whether a probe is open on this module."""
        return self._opened is not None

    @property
    def _measured(self) -> Opened:
        """What the module measures, while a probe is open."""
        assert self._opened is not None
        return self._opened

    def _measuring(self) -> Opened | None:
        """What this forward pass measures, or None without a probe or without grad mode."""
        return self._opened if torch.is_grad_enabled() else None

    def _plan_for(self, x: Tensor, features: int, transposed: bool = False) -> Plan:
        """The plan for ``x``, whose last ``features`` dimensions hold no samples."""
        opened = self._measured
        starts = None if opened.documents is None else self._starts(x, features)
        dim, plan = self._batch_dim(x, features), opened.plan
        if torch.compiler.is_compiling():
            # With a name in the graph, equal layers would not share a compiled graph.
            plan = plan._replace(module=None)
        if dim == 0 and starts is None and not transposed:
            return plan
        return plan._replace(batch_dim=dim, transposed=transposed, starts=starts)

    def _starts(self, x: Tensor, features: int, batch_dim: int | None = None) -> Tensor:
        """Where documents begin in the rows of ``x``, whose samples lie along ``batch_dim``, by
        default that of the layout. If dimensions follow those of the tokens, such as heads, a token
        has several rows.
        """
        opened = self._measured
        assert opened.documents is not None
        starts, tokens = opened.documents
        leading = x.shape[: x.ndim - features]
        dim = self.gnsfast.layout.batch_dim if batch_dim is None else batch_dim
        if dim == 1 and len(leading) > 1 and leading[1] != 1:
            raise SampleShapeError(
                f"{opened.name} ({type(self).__name__}): the sequence-first input of shape "
                f"{list(x.shape)} interleaves the tokens of its rows. Documents (cu_seqlens) need "
                "a single row here."
            )
        for k in range(1, len(leading) + 1):
            if leading[:k].numel() == tokens:
                return starts * leading[k:].numel()
        rows, rest = divmod(tokens, max(x.numel(), 1))
        one_row = isinstance(self, nn.Embedding) and x.shape[-1:].numel() == x.numel()
        if one_row and rows > 1 and not rest:
            raise SampleShapeError(
                f"{opened.name} ({type(self).__name__}): all {rows} packed rows share one index of "
                f"shape {list(x.shape)}, but each has documents of its own. If these are "
                f"position_ids, give the model position_ids of shape {[rows, x.numel()]} that "
                "begin again at 0 with every document."
            )
        raise SampleShapeError(
            f"{opened.name} ({type(self).__name__}): cu_seqlens ends at token {tokens}, but no "
            f"leading dimensions of the input of shape {list(x.shape)} have that size. If padding "
            "follows, add it as a last document. Otherwise leave the module out: convert(model, "
            f"exclude=[{opened.name!r}])."
        )

    def _batch_dim(self, x: Tensor, features: int) -> int:
        """The dimension of ``x`` that holds the samples. Raises if it does not hold B of them."""
        opened = self._measured
        if opened.documents is not None:
            return 0
        B, layout = opened.samples, self.gnsfast.layout
        leading = x.shape[: x.ndim - features]
        if not leading:
            if B == 1:
                return 0
            hint = ""
            if isinstance(self, nn.Embedding):
                hint = self._share_hint()
            raise self._shape_error(x, f"it has no batch dimension.{hint}")
        dim = layout.batch_dim if len(leading) > layout.batch_dim else 0
        if (
            B
            and layout.batch_dim
            and layout.flattened
            and len(leading) == 1
            and leading[0] % B == 0
        ):
            return 1
        rows = leading[dim]
        if rows == B or (layout.fold and dim == 0 and B and rows % B == 0):
            return dim
        hint = ""
        if isinstance(self, nn.Embedding) and len(leading) == 1:
            hint = self._share_hint()
        if B and rows % B == 0 and dim == 0 and not (hint and _counts(x)):
            hint = (
                f" If every {rows // B} consecutive rows are one sample, call convert(model, "
                f"fold=[{opened.name!r}])."
            )
        elif B in leading:
            found = leading.index(B)
            hint = (
                f" If the model has its samples along dimension {found}, call convert(model, "
                f"batch_dim={found})."
            )
        raise self._shape_error(x, f"dimension {dim} has size {rows}.{hint}")

    def _share_hint(self) -> str:
        name = self._measured.name
        return f" If all samples share this index, call convert(model, broadcast=[{name!r}])."

    def _shape_error(self, x: Tensor, found: str) -> SampleShapeError:
        opened = self._measured
        wanted = "1 sample" if opened.samples == 1 else f"{opened.samples} samples"
        return SampleShapeError(
            f"{opened.name} ({type(self).__name__}): expected {wanted} in an input of shape "
            f"{list(x.shape)}, but {found} Check num_samples. convert(model, example=batch) finds "
            f"the samples by itself, and convert(model, exclude=[{opened.name!r}]) leaves the "
            "module out."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        recipe = type(self).__dict__.get("_recipe")
        make, args = (_new, (type(self),)) if recipe is None else (_new_combined, recipe)
        # From Python 3.11 on object has a __getstate__ too: only one that a user wrote counts.
        own = any("__getstate__" in vars(c) for c in type(self).__mro__ if c is not object)
        state = self.__getstate__() if own else self.__dict__  # type: ignore[no-untyped-call]
        return make, args, {**state, "_opened": None} if isinstance(state, dict) else state


def _counts(index: Tensor) -> bool:
    """Whether an index holds consecutive positions, as one that samples share does."""
    return bool((index.diff() == 1).all())


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


_combined: dict[tuple[type, type, bool], type] = {}


def combine(cls: type, drop_in: type, over: bool) -> type:
    """A subclass of the user's ``cls`` with the forward of ``drop_in``.

    With ``over`` it replaces the forward of ``cls``. Without, the forward of ``cls`` runs first and
    calls it through ``super().forward``.
    """
    key = (cls, drop_in, over)
    if key not in _combined:
        bases = (drop_in, cls) if over else (cls, drop_in)
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_recipe": key,
        }
        _combined[key] = type(cls.__name__, bases, body)
    return _combined[key]


def is_around(cls: type) -> bool:
    """Whether the forward of the user's class runs first and calls that of the drop-in."""
    recipe: tuple[type, type, bool] | None = cls.__dict__.get("_recipe")
    return recipe is not None and not recipe[2]


def user_class(cls: type) -> type:
    """The user's class in a class that ``combine`` made, or ``cls`` itself."""
    recipe: tuple[type, type, bool] | None = cls.__dict__.get("_recipe")
    return cls if recipe is None else recipe[0]


def _new_combined(cls: type, drop_in: type, over: bool) -> Any:
    return _new(combine(cls, drop_in, over))

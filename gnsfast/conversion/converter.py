# SPDX-License-Identifier: Apache-2.0
"""``convert`` turns the modules of a model into gnsfast's modules, in place."""

import warnings
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from gnsfast.combinations import REPEATED, refuse
from gnsfast.conversion.coverage_table import coverage
from gnsfast.conversion.learning import Learned, learn
from gnsfast.conversion.recognition import Tried
from gnsfast.conversion.routes import (
    cost_of_replays,
    held,
    original_class,
    own_parameters,
    replayed,
    route_of,
    settings_of,
    uses_children_as_tensors,
)
from gnsfast.conversion.ties import link_ties
from gnsfast.layers import (
    Copied,
    DropIn,
    Experts,
    MultiheadAttention,
    OutProjection,
    Replayed,
    Router,
    SampleLayout,
    combine,
    rows_in_order,
)
from gnsfast.noise_scale import percent

WRAPPERS = {
    "FSDPModule": "call gnsfast.convert(model) before fully_shard(model)",
    "FullyShardedDataParallel": "use fully_shard, and call gnsfast.convert(model) before it",
    "DataParallel": "it runs copies of the model. Use DistributedDataParallel instead",
}
EXCLUDED = "excluded by convert"
LEAST_COVERED = 0.9
"""``convert`` warns if a smaller share of the elements has norms, because the noise scale then
describes only that part of the model."""
WHOLE_MODEL = (
    "the model itself uses this parameter, outside of every layer, and a replay would run the "
    "whole model for each sample. convert(model, example=batch) looks for a faster route"
)
SEQUENCE_FIRST = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# The output of these submodules has no batch dimension, so their norms would not be per sample.
NO_BATCH = {"relative_attention_bias": "its output has no batch dimension"}


def convert(
    model: nn.Module,
    *,
    example: Any = None,
    batch_dim: int | None = None,
    fold: Iterable[str] | None = None,
    broadcast: Iterable[str] | None = None,
    replay: Iterable[str] | None = None,
    repeated: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
) -> nn.Module:
    """Prepare the layers of ``model`` for per-sample gradient norms. Returns ``model``, changed in
    place.

    Only the classes of modules change. Parameters, buffers, hooks, dtype, device, training mode,
    tied weights, ``state_dict`` and outputs stay as they were. The modules run torch's code until a
    measurement starts. A second call replaces the options of the first.

    Args:
        example: what the model is called with, for two samples or more: a tensor, a tuple of
            arguments, a dict of keyword arguments, or a function that calls the model, under its
            own autocast. ``convert`` runs the model without gradients on up to 5 samples (on all if
            it does not take so few), in two orders and in part, and undoes what that changes. This
            shows where each module has its samples and which modules need a replay, so that the
            options below are rarely needed. It does not show a branch that only another batch
            takes, nor every loss that ties samples together: check these with ``gnsfast.verify``.
        batch_dim: the dimension that holds the samples: 0, or 1 for sequence-first models. The
            default is 0. With an example, ``convert`` tries 1 if samples mix along dimension 0 and
            a module is sequence-first.
        fold: patterns of modules whose input has k · B rows, of which k consecutive rows are one
            sample.
        broadcast: patterns of embeddings whose input is a bare index [T] that all samples share.
        replay: patterns of modules that the backward pass runs again for each sample, with all
            their submodules. This is slow, but exact even where a weight is used as a tensor.
        repeated: patterns of modules that the model calls several times in one pass, each time with
            the same samples in the same order, such as shared blocks, towers, or a head for each
            chunk. It includes their submodules. The calls of a layer are joined, so their inputs
            and output gradients stay in memory until backward has gone through all calls, and
            take that memory twice while the layer's operator runs. Layers whose calls cannot be
            joined are refused; name them in ``replay`` too.
        exclude: patterns of modules to leave out, with all their submodules, and of parameters.
            They get no norms.

    Patterns are those of ``fnmatch``, over the names in ``named_modules``. A pattern that matches
    nothing is an error.

    Raises:
        ValueError: for an option that matches nothing, a sequence-first model with ``batch_dim=0``,
            a model that FSDP or DataParallel already wraps, an example with one sample, or a model
            that ties samples together, such as one with a batch norm that trains.

    >>> model = gnsfast.convert(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8)))
    >>> type(model[0]).__module__
    'gnsfast.layers.linear'
    """
    if batch_dim not in (None, 0, 1):
        raise ValueError(f"batch_dim must be 0 or 1, not {batch_dim!r}")
    named = dict(model.named_modules())
    _refuse(named)
    if example is None:
        _refuse_sequence_first(named, batch_dim or 0)
    options = dict(
        fold=fold, broadcast=broadcast, replay=replay, repeated=repeated, exclude=exclude
    )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    asked = _Asked(
        **{
            option: _matching(option, p, [*named, *parameters] if option == "exclude" else named)
            for option, p in options.items()
        }
    )
    whole = {n for n, m in named.items() if uses_children_as_tensors(m)} | asked.replay
    claims_of = _all_claims(named, whole)
    for option in ("fold", "repeated", "exclude"):
        _refuse_empty(option, options[option], claims_of, parameters)
    routes = _routes(named, claims_of, whole)
    excluded = {id(p) for name, p in parameters.items() if name in asked.exclude}
    learned = Learned()
    if example is None:
        if issubclass(routes.get("", DropIn), Replayed) and not whole and len(routes) > 1:
            learned = Learned(reasons={"": WHOLE_MODEL})
    else:
        left_out = _within(routes, asked.exclude)
        left_out |= {n for n in routes if _all_in(named[n], claims_of[n], excluded)}
        kept = {n: cls for n, cls in routes.items() if n not in left_out}
        learned = learn(model, example, batch_dim, kept, claims_of, asked.replay)
        if learned.replay:
            claims_of = _all_claims(named, whole | learned.replay)
            routes = _routes(named, claims_of, whole | learned.replay)
        for name in [n for n in learned.copies if claims_of[n] and n not in learned.replay]:
            routes[name] = combine(original_class(type(named[name])), Copied, over=True)
    facts = _facts(named, routes, claims_of, asked, learned, batch_dim or 0)
    for name in routes if excluded else ():
        own = dict(named[name].named_parameters())
        facts[name]["uncovered"] |= {n: EXCLUDED for n in claims_of[name] if id(own[n]) in excluded}
    for name, module in named.items():
        if name in routes:
            module.__class__ = routes[name]
            module.gnsfast = routes[name].gnsfast._replace(**facts[name])
        elif isinstance(module, DropIn):
            module.know(claims=())
    link_ties(named, claims_of)
    _warn_of_replays(named, asked.replay, example is not None)
    _warn_of_gaps(model)
    return model


def _warn_of_gaps(model: nn.Module) -> None:
    """Warn once if much of the model has no norms, apart from what ``exclude`` left out."""
    rows = [r for r in coverage(model).rows if r.route != "frozen" and r.reason != EXCLUDED]
    covered = sum(r.elements for r in rows if r.static) / max(1, sum(r.elements for r in rows))
    without = [r for r in rows if not r.static]
    if not without or covered >= LEAST_COVERED:
        return
    largest = max(without, key=lambda r: r.elements)
    warnings.warn(
        f"Only {percent(covered)} of the trainable elements have per-sample norms, and the noise "
        "scale will describe these alone. The largest parameter without norms is "
        f"{largest.parameter}: {largest.reason}. print(gnsfast.coverage(model)) lists them all.",
        stacklevel=3,
    )


def _warn_of_replays(
    named: dict[str, nn.Module], asked: Collection[str], has_example: bool
) -> None:
    """Warn once if modules are replayed that nobody asked for, and say what that costs."""
    slow = [
        name
        for name, m in named.items()
        if isinstance(m, Replayed) and name not in asked
        if m.probed_parameters().keys() - m.gnsfast.uncovered
    ]
    if not slow:
        return
    costs = cost_of_replays([named[name] for name in slow])
    help = "" if has_example else "convert(model, example=batch) looks for faster routes. "
    few = ", ".join(f"{name or 'the model'} ({type(named[name]).__name__})" for name in slow[:3])
    more = f" and {len(slow) - 3} more" if len(slow) > 3 else ""
    warnings.warn(
        f"{'One module has' if len(slow) == 1 else f'{len(slow)} modules have'} no kernel: {few}"
        f"{more}. The backward pass therefore {costs}. {help}"
        "print(gnsfast.coverage(model)) shows the route of each parameter.",
        stacklevel=3,
    )


class _Asked(NamedTuple):
    """The modules that the patterns of each option match."""

    fold: set[str]
    broadcast: set[str]
    replay: set[str]
    repeated: set[str]
    exclude: set[str]


def _facts(
    named: dict[str, nn.Module],
    routes: dict[str, type[DropIn]],
    claims_of: dict[str, tuple[str, ...]],
    asked: _Asked,
    learned: Learned,
    batch_dim: int,
) -> dict[str, dict[str, Any]]:
    """The fields of ``Converted`` for each module. An option overrides what an example shows."""
    if odd := [n for n in sorted(asked.broadcast) if not isinstance(named[n], nn.Embedding)]:
        raise ValueError(
            f"broadcast: {odd[0]!r} is a {type(named[odd[0]]).__name__}, not an embedding"
        )
    if odd := [n for n in sorted(asked.fold & routes.keys()) if issubclass(routes[n], Replayed)]:
        raise ValueError(
            f"fold: {odd[0]!r} has no kernel, so it is replayed sample by sample, and a replay "
            "cannot fold rows. Replay a module around it, convert(model, replay=[...]), or leave "
            f"it out, convert(model, exclude=[{odd[0]!r}])."
        )
    left_out = _within(routes, asked.exclude)
    joined = (_within(routes, asked.repeated) | learned.repeated) & routes.keys() - left_out
    for name in sorted(joined):
        refuse(routes[name].gnsfast.route, [REPEATED], name)
    facts: dict[str, dict[str, Any]] = {}
    for name, cls in routes.items():
        rows = name in asked.fold, name in asked.broadcast, _flattened(name, cls, named)
        layout, reason = SampleLayout(batch_dim, *rows), NO_BATCH.get(name.rpartition(".")[2], "")
        if not any(rows[:2]):
            layout = learned.layouts.get(name, layout)
            reason = learned.reasons.get(name, "" if name in learned.layouts else reason)
        if name in left_out:
            reason = EXCLUDED
        uncovered = dict.fromkeys(claims_of[name], reason) if reason else {}
        if issubclass(cls, Copied):
            uncovered = learned.uncopied[name] | uncovered
        facts[name] = dict(
            claims=claims_of[name],
            layout=layout,
            uncovered=uncovered,
            repeated=name in joined,
            note=learned.notes.get(name, ""),
            shared=learned.shared.get(name, frozenset()),
            steps=learned.copies.get(name, ()),
            settings=settings_of(named[name], cls),
        )
    return facts


def _routes(
    named: dict[str, nn.Module], claims_of: dict[str, tuple[str, ...]], whole: set[str]
) -> dict[str, type[DropIn]]:
    """The class that each module becomes, from the class that it had before any ``convert``."""
    before = {name: type(module) for name, module in named.items()}
    routes: dict[str, type[DropIn]] = {}
    tried: Tried = {}
    try:
        for module in named.values():
            if (original := original_class(type(module))) is not type(module):
                module.__class__ = original
        for name, module in named.items():
            if claims_of[name]:
                route = replayed(module) if name in whole else route_of(module, tried)
                if route.cls is not None:
                    routes[name] = route.cls
        for name in [n for n, cls in routes.items() if issubclass(cls, MultiheadAttention)]:
            child = f"{name}.out_proj" if name else "out_proj"
            if child in routes:
                own = type(named[child])
                routes[child] = combine(own, OutProjection, over=own is nn.Linear)
    finally:
        for name, module in named.items():
            if type(module) is not before[name]:
                module.__class__ = before[name]
    return routes


def _flattened(name: str, cls: type, named: dict[str, nn.Module]) -> bool:
    """Whether a module in a mixture of experts certainly gets the rows of a whole batch."""
    if not name or not issubclass(cls, (Experts, Router)):
        return False
    block = named[name.rpartition(".")[0]]
    cls_of_block: Any = original_class(type(block))
    return "forward" not in vars(block) and rows_in_order(block, cls_of_block.forward, named[name])


def _refuse_empty(
    option: str,
    patterns: Iterable[str] | None,
    claims_of: dict[str, tuple[str, ...]],
    parameters: Iterable[str],
) -> None:
    """Raise for a pattern that reaches no parameter, which would otherwise do nothing."""
    for pattern in patterns or ():
        names = {n for n in claims_of if fnmatchcase(n, pattern)}
        reached = any(claims_of[n] for n in names)
        if option in ("repeated", "exclude"):
            reached |= any(claims_of[n] for n in claims_of if _inside(n, names))
        if option == "exclude":
            reached |= any(fnmatchcase(n, pattern) for n in parameters)
        if not reached:
            raise ValueError(
                f"{option}: the modules that match {pattern!r} have no parameters of their own "
                "(containers, or parts of a replayed module). Name the layers that hold them."
            )


def _within(names: Iterable[str], paths: set[str]) -> set[str]:
    """The ``names`` that are one of ``paths`` or lie inside one of them."""
    return {name for name in names if name in paths or _inside(name, paths)}


def _all_in(module: nn.Module, claims: tuple[str, ...], excluded: set[int]) -> bool:
    """Whether all parameters that a module answers for are among the ``excluded``."""
    return all(id(p) in excluded for n, p in module.named_parameters() if n in claims)


def _inside(name: str, paths: set[str]) -> bool:
    return any(name != path and (not path or name.startswith(f"{path}.")) for path in paths)


def _claims(module: nn.Module, whole: bool) -> tuple[str, ...]:
    """The parameters that a module answers for: its own, or with ``whole`` all in it.

    A submodule answers for a parameter that both have (BERT's head lists its decoder's bias as its
    own). The module that holds a bare container answers for the container's parameters.
    """
    if whole:
        return tuple(n for n, _ in module.named_parameters())
    own = held(module)
    children = (c for n, c in module.named_children() if n not in own)
    below = {id(p) for child in children for p in child.parameters()}
    claims = (n for n, p in own_parameters(module).items() if id(p) not in below)
    # Kernels give a bias the last row. Torch puts a weight behind it where it was parametrized.
    return tuple(sorted(claims, key="bias".__eq__))


def _all_claims(named: dict[str, nn.Module], whole: set[str]) -> dict[str, tuple[str, ...]]:
    """The parameters that each module answers for."""
    paths = {f"{name}.{n}" if name else n for name, m in named.items() for n in held(m)}
    return {
        n: () if n in paths or _inside(n, paths | whole) else _claims(m, n in whole)
        for n, m in named.items()
    }


def _refuse(named: dict[str, nn.Module]) -> None:
    for name, module in named.items():
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise ValueError(
                    f"{name or 'The model'} is wrapped by {cls.__name__}: {WRAPPERS[cls.__name__]}."
                )
        forward = vars(module).get("forward")
        if getattr(forward, "__module__", "").startswith("transformers.distributed."):
            raise ValueError(
                f"{name or 'The model'} runs a forward of transformers' own model parallelism, "
                "which does not call gnsfast's layers. Load the model without it, call "
                "gnsfast.convert(model), then torch's parallelize_module."
            )


def _refuse_sequence_first(named: dict[str, nn.Module], batch_dim: int) -> None:
    for name, module in named.items():
        if isinstance(module, SEQUENCE_FIRST) and module.self_attn.batch_first == bool(batch_dim):
            first, dim = ("batch", 0) if batch_dim else ("sequence", 1)
            raise ValueError(
                f"{name or 'The model'} ({type(module).__name__}) is {first}-first: call "
                f"convert(model, batch_dim={dim}), or convert(model, example=batch) to find it."
            )


def _matching(option: str, patterns: Iterable[str] | None, named: Collection[str]) -> set[str]:
    if isinstance(patterns, str):
        raise ValueError(
            f"{option} takes a list of patterns, not a string: write {option}=[{patterns!r}]"
        )
    found = set()
    for pattern in patterns or ():
        names = {n for n in named if fnmatchcase(n, pattern)}
        if not names:
            kind = "module or parameter" if option == "exclude" else "module"
            raise ValueError(f"{option}: no {kind} has a name that matches {pattern!r}")
        found |= names
    return found

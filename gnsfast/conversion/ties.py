# SPDX-License-Identifier: Apache-2.0
"""Weights that several modules share."""

import glob
import os

from torch import nn

from gnsfast.conversion.routes import LISTS, cost_of_replays, replayed
from gnsfast.layers import DropIn, Embedding, Linear, OutProjection, Tie


def link_ties(named: dict[str, nn.Module], claims_of: dict[str, tuple[str, ...]]) -> None:
    """Link the embeddings and the head that share a weight. All other shared parameters get no
    norms, and a reason.
    """
    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, claims in claims_of.items():
        own = dict(named[path].named_parameters()) if claims else {}
        for name in claims:
            users.setdefault(id(own[name]), []).append((path, named[path], name))
    for sharers in users.values():
        probed = [(m, name) for _, m, name in sharers if isinstance(m, DropIn)]
        if len(sharers) == 1 or not probed:
            continue
        modules = [m for m, _ in probed]
        heads = sum(isinstance(m, Linear) and not isinstance(m, OutProjection) for m in modules)
        embeddings = sum(isinstance(m, Embedding) for m in modules)
        reasons = [m.gnsfast.uncovered.get(name) for m, name in probed]
        reasons = [reason for reason in reasons if reason]
        if heads <= 1 and embeddings and heads + embeddings == len(sharers) and not reasons:
            tie = Tie()
            for m in modules:
                m.know(tie=tie)
        else:
            why = reasons[0] if reasons else _shared(named, [path for path, _, _ in sharers])
            for m, name in probed:
                m.know(uncovered={**m.gnsfast.uncovered, name: why})


def _shared(named: dict[str, nn.Module], paths: list[str]) -> str:
    """Why a parameter of these modules has no norms, and what covers it."""
    parts = os.path.commonprefix([path.split(".") for path in paths])
    while parts and isinstance(named[".".join(parts)], LISTS):
        parts = parts[:-1]
    around = ".".join(parts)
    has_forward = type(named[around]).forward is not nn.Module.forward
    why = f"it is shared by {', '.join(map(repr, paths))}"
    if not has_forward or replayed(named[around]).cls is None:
        return why
    return (
        f"{why}. convert(model, replay=[{glob.escape(around)!r}]) covers it, if each pass calls "
        "that module once, with the samples along dimension 0: the backward pass then "
        f"{cost_of_replays([named[around]])}"
    )

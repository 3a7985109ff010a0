# SPDX-License-Identifier: Apache-2.0
"""Weights that several modules share."""

from torch import nn

from gnsfast.layers import Embedding, Linear, Probed, Tie


def link_ties(named: dict[str, nn.Module], claims_of: dict[str, tuple[str, ...]]) -> None:
    """Link embeddings and the head that share a weight; other shared parameters are left out, by
    name.
    """
    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    # An attention layer uses its output projection by itself, without the links of a head.
    inside = {id(m.out_proj) for m in named.values() if isinstance(m, nn.MultiheadAttention)}
    for path, claims in claims_of.items():
        own = dict(named[path].named_parameters()) if claims else {}
        for name in claims:
            users.setdefault(id(own[name]), []).append((path, named[path], name))
    for sharers in users.values():
        probed = [(m, name) for _, m, name in sharers if isinstance(m, Probed)]
        if len(sharers) == 1 or not probed:
            continue
        modules = [m for m, _ in probed]
        heads = sum(isinstance(m, Linear) and id(m) not in inside for m in modules)
        embeddings = sum(isinstance(m, Embedding) for m in modules)
        reasons = [m._uncovered[name] for m, name in probed if name in m._uncovered]
        if heads <= 1 and embeddings and heads + embeddings == len(sharers) and not reasons:
            tie = Tie()
            for m in modules:
                m._tie = tie
        else:
            paths = ", ".join(repr(path) for path, _, _ in sharers)
            for m, name in probed:
                reason = reasons[0] if reasons else f"a weight shared by {paths}"
                m._uncovered = {**m._uncovered, name: reason}

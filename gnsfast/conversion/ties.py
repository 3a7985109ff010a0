# SPDX-License-Identifier: Apache-2.0
"""Weights that several modules share."""

from torch import nn

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
            paths = ", ".join(repr(path) for path, _, _ in sharers)
            for m, name in probed:
                reason = reasons[0] if reasons else f"its weight is shared by {paths}"
                m.know(uncovered={**m.gnsfast.uncovered, name: reason})

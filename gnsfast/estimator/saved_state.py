# SPDX-License-Identifier: Apache-2.0
"""Checks that a saved state fits the estimator that loads it."""

from typing import Any

from gnsfast.estimator.observer import Observer


def identity(observer: Observer, window: int, every: int) -> dict[str, Any]:
    """The properties of the model and the settings to which measurements belong."""
    s = observer.settings
    return {
        "unit": s.unit,
        "parameters": list(observer.slab.parameters),
        "left_out": list(observer.slab.left_out),
        "units": [(name, name.rpartition(".")[0]) for name in observer.slab.parameters],
        "local": s.local,
        "loss_reduction": s.loss_reduction,
        "metric": None if s.optimizer is None else "adam",
        "dual": list(s.dual),
        "groups": list(s.groups),
        "clusters": s.clusters,
        "window": window,
        "every": every,
    }


def refuse_other(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise ValueError for a state of another model or of other settings."""
    for key, ours in identity.items():
        theirs = state.get(key)
        if theirs == ours:
            continue
        if isinstance(ours, list) and isinstance(theirs, list):
            differ = sorted(map(str, set(ours) ^ set(theirs)))[:5]
            how = f"differs in {differ}" if differ else "is in another order"
            raise ValueError(f"The saved state belongs to another model: its list of {key} {how}.")
        raise ValueError(
            f"The saved state was made with {key}={theirs!r}, but this estimator has "
            f"{key}={ours!r}."
        )

# SPDX-License-Identifier: Apache-2.0
"""Who asks for eager mode, and when it ends."""

import torch
from torch import nn

from gnsfast.eager import Eager


class Owner:
    pass


def is_compiled() -> bool:
    """Whether the compiler is asked for a graph."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    return bool(graphs)


def test_owners_that_end_in_any_order() -> None:
    eager = Eager()
    release = eager.hold(Owner())  # which nobody keeps: it is over at once
    assert is_compiled()
    release = eager.hold(owner := Owner())
    with eager.meanwhile():
        release()  # as the garbage collector may do
        assert not is_compiled()
    assert is_compiled()
    with eager.meanwhile():
        release = eager.hold(owner)
    assert not is_compiled()
    del owner
    assert is_compiled() and not release.alive  # type: ignore[attr-defined]

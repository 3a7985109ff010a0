# SPDX-License-Identifier: Apache-2.0
"""What flows between the parts of a model that the user calls one by one: each sample of what a
part gets must be made of the same sample of what other parts have returned.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.following.layouts import Layout, weights_of
from gnsfast.following.proof import telling_apart

Edge = tuple[Any, int]
"""A node of autograd's graph, and the number of its result."""


class Returned:
    """The results of the parts in an open block, of B samples."""

    def __init__(self) -> None:
        self._of: dict[Edge, tuple[nn.Module, Layout]] = {}

    def add(self, module: nn.Module, results: Sequence[Tensor], places: Sequence[Any]) -> None:
        """Note what a part has returned, in which the samples lie as ``places`` say."""
        for t, place in zip(results, places):
            if isinstance(place, Layout) and t.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(t)
                self._of[edge.node, edge.output_nr] = module, place

    def crossing(self, given: Sequence[tuple[Tensor, Layout]], B: int) -> list[nn.Module]:
        """The parts of whose results a sample reaches another one of what a part is ``given``, as
        the gradients between them show.
        """
        found: dict[nn.Module, None] = {}
        edges = self._behind([t for t, _ in given])
        for samples in telling_apart(B) if edges else ():
            others = [b for b in range(B) if b not in samples]
            weights = [weights_of(t.numel(), t).view(t.shape) for t, _ in given]
            for w, (_, layout) in zip(weights, given):
                layout.samples_first(w, B)[others] = 0.0
            grads = torch.autograd.grad(
                [t for t, _ in given],
                [torch.autograd.graph.GradientEdge(*edge) for edge in edges],
                weights,
                retain_graph=True,
                allow_unused=True,
            )
            for edge, g in zip(edges, grads):
                module, layout = self._of[edge]
                if g is not None and layout.fits(g.shape, B):
                    own_B = layout.samples_first(g, B).flatten(1).square().sum(1)
                    if float(own_B[others].sum()) > 1e-12 * float(own_B.sum()):
                        found[module] = None
        return [*found]

    def _behind(self, tensors: list[Tensor]) -> list[Edge]:
        """The results that are the nearest ones behind some tensors."""
        edges = map(torch.autograd.graph.get_gradient_edge, tensors)
        todo: list[Edge] = [(edge.node, edge.output_nr) for edge in edges]
        seen: dict[Edge, None] = {}
        while todo and self._of:
            if (edge := todo.pop()) not in seen:
                seen[edge] = None
                todo += [] if edge in self._of else [e for e in edge[0].next_functions if e[0]]
        return [edge for edge in seen if edge in self._of]

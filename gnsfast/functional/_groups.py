# SPDX-License-Identifier: Apache-2.0
"""Groups of samples (data domains): the squared norms of their summed gradients.

A weight gradient's operator runs once for each group, on its samples, and the groups' gradients add
up to the whole: no product is made twice.
"""

from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.functional._samples import num_samples
from gnsfast.reference import sqnorm
from gnsfast.tensors import accumulate_dtype, is_dtensor


class Groups(NamedTuple):
    """A second probe, for the squared norms of groups' summed gradients, and who is in them.

    ``probe`` is float32 zeros [P, G]; ``members`` are G index tensors that hold each of the B
    samples once.

    >>> x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    >>> probe, of_groups = (torch.zeros(1, n, requires_grad=True) for n in (3 + 2, 2))
    >>> groups = gnsfast.functional.Groups(of_groups, (torch.tensor([1]), torch.tensor([0, 2])))
    >>> gnsfast.functional.linear(x, w, None, probe, groups=groups).sum().backward()
    >>> torch.allclose(of_groups.grad[0, 0], probe.grad[0, 1])
    True
    """

    probe: Tensor
    members: tuple[Tensor, ...]


def group_inputs(groups: Groups | None, probe: Tensor, *others: Any) -> tuple[Any, Any]:
    """What a layer takes for its ``groups``, beside its ``probe`` and none of the ``others``.

    Raises:
        NotImplementedError: in a compiled graph, which would be made anew for each composition.
        ValueError: with documents, a metric, links or blocks; for members that are not all samples.
    """
    if groups is None:
        return None, None
    B, P = num_samples(probe), len(probe)
    if any(others):
        raise ValueError("groups do not go with a metric, documents, links or input_blocks")
    if sum(map(len, groups.members)) != B or groups.probe.shape != (P, len(groups.members)):
        raise ValueError(
            f"groups must hold each of the {B} samples once, and their probe be "
            f"[{P}, {len(groups.members)}], not {list(groups.probe.shape)}"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "groups of samples have no norms in a compiled model: their sizes change with each "
            "batch. Measure them in eager mode, every so many updates"
        )
    return groups.probe, groups.members


def by_group(
    run: Callable[[Tensor], tuple[Tensor, ...]],
    members: tuple[Tensor, ...],
    dy_BTF: Tensor,
    wanted: tuple[bool, ...],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """An operator's gradients, ``sqnorm_PB`` and the groups' own norms [P, G].

    ``run(index)`` is the operator on these samples: gradients, of which some are ``wanted``, and
    the probe rows of these.
    """
    if is_dtensor(dy_BTF):
        raise NotImplementedError("groups of samples have no norms in tensor parallel layers")
    grads: list[Tensor] = []
    parts = []
    for index in members:
        *of_group, rows = run(index)
        parts.append(rows)
        if not grads:
            grads = [g.to(accumulate_dtype(g.dtype)) for g in of_group]
        else:
            for total, g in zip(grads, of_group):
                total += g
    sqnorm_PB = parts[0].new_empty(len(parts[0]), len(dy_BTF) + 2)
    for index, rows in zip(members, parts):
        sqnorm_PB[:, index] = rows[:, :-2]
    for row, g in zip(sqnorm_PB, compress(grads, wanted)):
        row[-2] = sqnorm(g)
    sqnorm_PB[:, -1] = 1.0
    return grads, sqnorm_PB, torch.stack([rows[:, -2] for rows in parts], 1)

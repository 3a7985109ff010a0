# SPDX-License-Identifier: Apache-2.0
"""Samples that are split over processes: seen wherever they leave a trace, and refused.

The gradient of such a sample is the sum of its parts' gradients, and the squared norm of a sum is
not the sum of squared norms: with two parts tr Σ came out 1.97 times too large. Sequences that are
split by hand between processes with nothing but the default group are not seen.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.tensors import is_dtensor
from gnsfast.torch_internals import (
    functions_of_context_parallel,
    process_groups,
    root_mesh,
    splits_sequences,
)

NAMES = {"context", "cp", "seq", "sequence", "sp", "ulysses"}
"""Names of mesh dimensions and process groups over which the parts of a sample are spread."""

OF_PARTS = (
    "squared norms of a sample's parts do not add up to the sample's. Measure from a checkpoint, "
    "in a run where each process has whole samples: context and sequence parallel sizes of 1, with "
    "tensor parallelism (parallelize_module) or FSDP2 where memory is short."
)

WHOLE_SAMPLES = f"This splits each sample over processes, and {OF_PARTS}"

RENAME_DIMENSION = (
    "give the dimension of the mesh another name in init_device_mesh, such as 'tp' or 'dp_shard'."
)

RENAME_GROUP = (
    "create it with another group_desc (dist.new_group(ranks, group_desc='other')), or where a "
    "library creates it, call group._set_group_desc('other') on it before measuring."
)


def in_context_parallel() -> bool:
    """Whether torch's ``context_parallel`` has replaced attention."""
    return F.scaled_dot_product_attention in functions_of_context_parallel()


def refuse_context_parallel(always: bool = False) -> None:
    """Raise if context parallelism is active."""
    if always or in_context_parallel():
        raise ObservationError(
            f"The pass ran inside torch's context_parallel(...). {WHOLE_SAMPLES}"
        )


def refuse_split_samples(model: nn.Module, parameters: Iterable[Any], processes: set[int]) -> None:
    """Raise if attention, a parameter's mesh or a group of ``processes`` splits samples."""
    for path, module in model.named_modules():
        if splits_sequences(module):
            raise NotImplementedError(
                f"The attention {path!r} exchanges keys and values between processes "
                f"(torch's context parallelism). {WHOLE_SAMPLES}"
            )
    parameters = list(parameters)
    for name in _mesh_dimensions(parameters):
        _refuse_named(f"A parameter's mesh has a dimension {name!r}", name, RENAME_DIMENSION)
    for name in _group_names(parameters, processes):
        remedy = RENAME_DIMENSION if name.startswith("mesh_") else RENAME_GROUP  # of a mesh
        _refuse_named(f"This process is in a group {name!r}", name, remedy)


def _refuse_named(seen: str, name: str, remedy: str) -> None:
    if _short(name) in NAMES:
        raise NotImplementedError(
            f"{seen} of more than one process. By this name gnsfast takes it for one that splits "
            f"each sample over processes, and {OF_PARTS} If it splits no samples, {remedy}"
        )


def refuse_parts(batch: Any) -> None:
    """Raise on every process if the ``position_ids`` [rows, T] of their batches are parts of the
    same samples.

    Each process then has T positions, in one piece, or in two to balance the load. All its rows
    begin at the same position, so that processes begin at 0, s, 2s and so on, where s is T or
    T / 2. In the second case those that begin at 0 leave out positions, else rows only overlap.
    Consecutive pieces of a text, one for each process, have the same positions as parts, and are
    refused too. Every process must call this, as they exchange where they begin. This waits for
    the device.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _begin(batch))
    if None in found or len({T for T, _, _ in found}) > 1:
        return
    T, begins = found[0][0], sorted({begin for _, begin, _ in found})
    steps = {2 * (b - a) for a, b in pairwise(begins)}
    if T <= 2 or begins[0] != 0 or len(steps) != 1 or not steps <= {T, 2 * T}:
        return
    if steps == {T} and any(begin == 0 and unbroken for _, begin, unbroken in found):
        return
    raise ObservationError(
        f"All rows of this process's batch begin at position {found[dist.get_rank()][1]}, and "
        f"those of all processes at {begins}, with {T} positions each. gnsfast takes them for "
        f"parts of the same samples, and {OF_PARTS} Consecutive pieces of one text, dealt to the "
        "processes, have the same positions and cannot be told apart from parts. If each row is "
        "such a piece and a whole sample, let its position_ids begin at 0, which is the same to "
        "rotary and other relative positions, or leave them out of the batch. To keep them, "
        "measure in a loop of your own: gnsfast.GradientNoiseScale does not read positions."
    )


def _begin(batch: Any) -> tuple[int, int, bool] | None:
    """T, the position where all rows of a batch begin, if there is one, and whether no row leaves
    out a position.
    """
    position_ids = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return None
    begins = position_ids[:, 0].unique().tolist()
    unbroken = bool((position_ids.diff() == 1).all())
    return (position_ids.shape[1], int(begins[0]), unbroken) if len(begins) == 1 else None


def _short(name: str) -> str:
    """``cp`` of torch's ``mesh_cp``, ``context`` of Megatron's ``CONTEXT_PARALLEL_GROUP``."""
    name = name.lower().removeprefix("mesh_").removesuffix("_group")
    return name.removesuffix("_parallel")


def _mesh_dimensions(parameters: Iterable[Any]) -> Iterator[str]:
    """The dimensions of root meshes with more than one process. The name of a flattened mesh, such
    as Accelerate's ``dp_shard_cp``, may contain dimensions of size 1, so it does not count.
    """
    for mesh in {root_mesh(p.device_mesh) for p in parameters if is_dtensor(p)}:
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape):
            if size > 1:
                yield name


def _group_names(parameters: Iterable[Any], processes: set[int]) -> Iterator[str]:
    """The descriptions of this process's groups with more than one of ``processes``, but for those
    over which tensor parallelism and FSDP2 spread the parameters.
    """
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    spread = {group.group_name for mesh in meshes for group in mesh.get_all_groups()}
    for group in process_groups():
        ranks = {*dist.get_process_group_ranks(group)}
        if len(processes & ranks) > 1 and group.group_name not in spread:
            yield group.group_desc

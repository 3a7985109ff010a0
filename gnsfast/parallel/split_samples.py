# SPDX-License-Identifier: Apache-2.0
"""Samples that are split over processes: seen wherever they leave a trace, and refused.

The gradient of such a sample is the sum of its parts' gradients, and the squared norm of a sum is
not the sum of squared norms: with two parts tr Σ came out 1.97 times too large. Sequences that are
split by hand between processes with nothing but the default group are not seen.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.tensors import is_dtensor

NAMES = {"context", "cp", "seq", "sequence", "sp", "ulysses"}
"""Names of mesh dimensions and process groups over which the parts of a sample are spread."""

WHOLE_SAMPLES = (
    "This splits each sample over processes, and squared norms of a sample's parts do not add up "
    "to the sample's. Measure from a checkpoint, in a run where each process has whole samples: "
    "context and sequence parallel sizes of 1, with tensor parallelism (parallelize_module) or "
    "FSDP2 where memory is short."
)


def in_context_parallel() -> bool:
    """Whether torch's ``context_parallel`` has replaced attention. Its list of replaced functions
    is kept after it ends.
    """
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    replaced: Any = getattr(sys.modules.get(name), "_replaced_functions", None)
    return bool(replaced) and F.scaled_dot_product_attention in replaced


def refuse_context_parallel(always: bool = False) -> None:
    """Raise if context parallelism is active."""
    if always or in_context_parallel():
        raise ObservationError(
            f"The pass ran inside torch's context_parallel(...). {WHOLE_SAMPLES}"
        )


def refuse_split_samples(model: nn.Module, parameters: Iterable[Any], processes: set[int]) -> None:
    """Raise if attention, a parameter's mesh or a group of ``processes`` splits samples."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            owner = getattr(getattr(hook, "func", None), "__self__", None)
            if type(owner).__name__ == "_ContextParallel":  # a plan of torch's, as torchtitan's
                raise NotImplementedError(
                    f"The attention {path!r} exchanges keys and values between processes "
                    f"(torch's context parallelism). {WHOLE_SAMPLES}"
                )
    for name in {*_mesh_dimensions(parameters), *_group_names(processes)}:
        if _short(name) in NAMES:
            raise NotImplementedError(
                f"The processes have a mesh dimension or a group {name!r} of more than one of "
                f"them. {WHOLE_SAMPLES} If it splits layers and not samples, call it 'tp'."
            )


def refuse_parts(batch: Any, processes: int) -> None:
    """Raise if the ``position_ids`` [rows, T] of a batch begin in the middle of its samples.

    Each process then has T positions, in one piece, or in two to balance the load. All its rows
    begin at the same multiple of T / 2. This waits for the device.
    """
    position_ids = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if processes == 1 or not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return
    T, begins = position_ids.shape[1], position_ids[:, 0].unique().tolist()
    if T > 2 and len(begins) == 1 and begins[0] > 0 and 2 * begins[0] % T == 0:
        raise ObservationError(
            f"All rows of this process's batch begin at position {begins[0]}, and {processes} "
            "processes train. So the positions before that are on another process. "
            f"{WHOLE_SAMPLES}"
        )


def _short(name: str) -> str:
    """``cp`` of torch's ``mesh_cp``, ``context`` of Megatron's ``CONTEXT_PARALLEL_GROUP``."""
    name = name.lower().removeprefix("mesh_").removesuffix("_group")
    return name.removesuffix("_parallel")


def _mesh_dimensions(parameters: Iterable[Any]) -> Iterator[str]:
    """The dimensions of root meshes with more than one process. The name of a flattened mesh, such
    as Accelerate's ``dp_shard_cp``, may contain dimensions of size 1, so it does not count.
    """
    for mesh in {p.device_mesh._get_root_mesh() for p in parameters if is_dtensor(p)}:
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape):
            if size > 1:
                yield name


def _group_names(processes: set[int]) -> Iterator[str]:
    """The descriptions of this process's groups with more than one of ``processes``."""
    for group in dist.distributed_c10d._world.pg_map:
        if len(processes & {*dist.get_process_group_ranks(group)}) > 1:
            yield group.group_desc

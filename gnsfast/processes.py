# SPDX-License-Identifier: Apache-2.0
"""Which processes share an update, and how: data, tensor and pipeline parallelism.

Told by the parameters themselves: a DTensor on a mesh that FSDP2 does not own, or on more of it
than FSDP2 shards, is tensor parallel. Pipeline stages have other parameters and are told by the
group that holds them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from gnsfast.errors import ObservationError
from gnsfast.sharding import is_dtensor


@dataclass(frozen=True)
class Processes:
    """``world`` processes, of which ``data`` see different samples.

    ``tensor`` share every layer of the model, and so find the same norms; ``stages`` have
    different layers for the same samples.
    """

    world: int = 1
    tensor: int = 1
    stages: int = 1

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.stages)

    def copies(self, grad: Any) -> int:
        """On how many of the processes the same part of a gradient lies."""
        alike = self.world // self.stages
        if not is_dtensor(grad):
            return alike
        copies: int = alike // grad.device_mesh.size()
        for size, placement in zip(grad.device_mesh.shape, grad.placements):
            if placement.is_replicate():
                copies *= size
            elif placement.is_partial():
                raise NotImplementedError(f"a gradient with placement {placement} has no norm yet")
        return copies


def find_processes(
    model: nn.Module, group: "dist.ProcessGroup | None", stages: "dist.ProcessGroup | None"
) -> Processes:
    """The processes that train ``model``.

    Raises:
        NotImplementedError: for context parallelism, and for layers that are sharded over different
            numbers of processes (expert parallelism).
        ValueError: for a group that does not hold all processes of the model.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    world, depth = dist.get_world_size(group), 1 if stages is None else dist.get_world_size(stages)
    sharded_over = _data_parallel(model)
    tensor: dict[int, str] = {}
    for name, p in model.named_parameters():
        if is_dtensor(p):
            mesh: Any = p.device_mesh  # type: ignore[attr-defined]
            _refuse_context_parallel(name, mesh)
            tensor.setdefault(mesh.size() // sharded_over.get(id(p), 1), name)
            if world % (mesh.size() * depth):
                raise ValueError(
                    f"{name} lies on a mesh of {mesh.size()} processes, and the noise scale is "
                    f"taken over {world}: give GradientNoiseScale the process_group of all "
                    "processes that train the model (data and model parallel ones together)"
                )
    degrees = sorted(tensor.keys() - {1})
    if len(degrees) > 1:
        raise NotImplementedError(
            f"{tensor[degrees[0]]} is shared by {degrees[0]} processes and {tensor[degrees[1]]} by "
            f"{degrees[1]}: a model with several degrees of model parallelism (expert "
            "parallelism) has no noise scale yet"
        )
    degree = degrees[0] if degrees else 1
    if world % (degree * depth):
        raise ValueError(
            f"{world} processes are not a whole number of models of {degree} tensor parallel "
            f"times {depth} pipeline processes"
        )
    return Processes(world, degree, depth)


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's own record of the parameters it shards together, with their module's name."""
    for path, module in model.named_modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            yield path, group


def _data_parallel(model: nn.Module) -> dict[int, int]:
    """Over how many data-parallel processes FSDP2 spreads each parameter, by its id."""
    found: dict[int, int] = {}
    for _, group in parameter_groups(model):
        info = group.mesh_info
        size = getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1)
        found |= {id(p.sharded_param): size for p in group.fsdp_params}
    return found


def _refuse_context_parallel(name: str, mesh: Any) -> None:
    dims = [part for dim in mesh.mesh_dim_names or () for part in dim.split("_")]
    if "cp" in dims:
        raise NotImplementedError(f"{name} lies on a mesh with a dimension 'cp': {CONTEXT}")


def in_context_parallel() -> bool:
    """Whether torch's ``context_parallel`` has taken attention over."""
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    return bool(getattr(sys.modules.get(name), "_replaced_functions", None))


def refuse_context_parallel(always: bool = False) -> None:
    """A part of a sample has a gradient of its own, whose square does not add to the others'."""
    if always or in_context_parallel():
        raise ObservationError(f"the pass ran inside of context_parallel: {CONTEXT}")


CONTEXT = (
    "context parallelism splits each sample over processes, and squared norms of a sample's parts "
    "do not add up to the sample's. Measure in a run without it, or on a batch outside of it."
)

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
from gnsfast.tensors import is_dtensor


@dataclass(frozen=True)
class Processes:
    """``world`` processes, of which ``data`` see different samples.

    ``tensor`` share every layer of the model, and so find the same norms; ``stages`` have
    different layers for the same samples. ``coordinate`` is this one's place among those that
    share a layer.
    """

    world: int = 1
    tensor: int = 1
    stages: int = 1
    coordinate: int = 0

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
                raise NotImplementedError(
                    f"a gradient of shape {list(grad.shape)} with placement {placement}, not yet "
                    "summed over processes, has no norm"
                )
        return copies


def find_processes(
    model: nn.Module, group: "dist.ProcessGroup | None", stages: "dist.ProcessGroup | None"
) -> Processes:
    """The processes that train ``model``, wrappers included. With ``stages`` all of these call it.

    Raises:
        NotImplementedError: for context parallelism, and for layers that are sharded over different
            numbers of processes (expert parallelism).
        ValueError: for a group that does not hold all processes of the model.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    if stages is None:
        return _find(model, group, None, [])
    error, degree = None, 1
    try:
        degree = _find(model, group, stages, []).tensor
    except (NotImplementedError, ValueError) as e:
        error = f"{type(e).__name__}: {e}"
    told = gathered((degree, error), stages)  # before anyone raises: the others would wait
    if errors := [f"stage {k}: {e}" for k, (_, e) in enumerate(told) if e is not None]:
        raise ValueError("; ".join(errors))
    return _find(model, group, stages, [d for d, _ in told])


def gathered(value: Any, group: "dist.ProcessGroup | None") -> list[Any]:
    """``value`` of every process of the group."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def _find(
    model: nn.Module,
    group: "dist.ProcessGroup | None",
    stages: "dist.ProcessGroup | None",
    elsewhere: list[int],
) -> Processes:
    """The same from this process's parameters and the tensor parallel degrees ``elsewhere``."""
    members = set(dist.get_process_group_ranks(group))
    depth = 1 if stages is None else dist.get_world_size(stages)
    if stages is not None:
        _refuse_outside("the pipeline's stages", set(dist.get_process_group_ranks(stages)), members)
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            _refuse_outside(f"{path or 'the model'}, a DistributedDataParallel,", ranks, members)
    sharded_over, coordinate = fsdp_degrees(model), 0
    degrees: dict[int, str] = dict.fromkeys(elsewhere, "a layer of another stage")
    for name, p in model.named_parameters():
        if is_dtensor(p):
            mesh: Any = p.device_mesh  # type: ignore[attr-defined]
            _refuse_context_parallel(name, mesh)
            _refuse_outside(name, set(mesh.mesh.flatten().tolist()), members)
            degrees.setdefault(mesh.size() // sharded_over.get(id(p), 1), name)
            if id(p) not in sharded_over:
                coordinate = int((mesh.mesh.flatten() == dist.get_rank()).nonzero()[0])
    several = sorted(degrees.keys() - {1})
    if len(several) > 1:
        raise NotImplementedError(
            f"{degrees[several[0]]} is shared by {several[0]} processes and {degrees[several[1]]} "
            f"by {several[1]}: {SEVERAL}"
        )
    on = Processes(len(members), several[0] if several else 1, depth, coordinate)
    if on.world % (on.tensor * on.stages):
        raise ValueError(
            f"{on.world} processes are not a whole number of models of {on.tensor} tensor parallel "
            f"times {on.stages} pipeline processes"
        )
    for name, p in model.named_parameters():
        if sharded_over.get(id(p), on.data) != on.data:
            raise NotImplementedError(
                f"{name} is spread by FSDP over {sharded_over[id(p)]} data-parallel processes, of "
                f"{on.data} in all: {SEVERAL}"
            )
    return on


SEVERAL = (
    "a model with several degrees of model parallelism (expert parallelism) has no noise scale yet"
)


def _refuse_outside(what: str, ranks: set[int], members: set[int]) -> None:
    if not ranks <= members:
        raise ValueError(
            f"{what} lies on processes {sorted(ranks)}, and the noise scale is taken over "
            f"{sorted(members)}: give GradientNoiseScale the process_group of all processes that "
            "train the model (data and model parallel ones together)"
        )


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's own record of the parameters it shards together, with their module's name."""
    for path, module in model.named_modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            yield path, group


def fsdp_degrees(model: nn.Module) -> dict[int, int]:
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

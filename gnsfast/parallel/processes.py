# SPDX-License-Identifier: Apache-2.0
"""Finds which processes share an update, and how: by data or tensor parallelism.

The parameters show tensor parallelism: a DTensor is tensor parallel if its mesh does not belong to
FSDP2, or is larger than the part that FSDP2 shards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from gnsfast.parallel.split_samples import refuse_split_samples
from gnsfast.tensors import is_dtensor
from gnsfast.torch_internals import gathered_parameters, parameter_groups

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """``world`` processes, which are ``data`` times ``tensor``.

    ``data`` processes have different samples. ``tensor`` processes share every layer, and so
    measure the same norms. ``coordinate`` is the place of this process among those that share a
    layer. The sum of gradients is divided by ``factor`` if FSDP2's ``set_gradient_divide_factor``
    was called, else by ``data``.
    """

    world: int = 1
    tensor: int = 1
    coordinate: int = 0
    factor: float | None = None

    @property
    def data(self) -> int:
        return self.world // self.tensor

    @property
    def divisor(self) -> float:
        return self.data if self.factor is None else self.factor

    def copies(self, grad: Any) -> int:
        """The number of processes that hold the same part of a gradient."""
        if not is_dtensor(grad):
            return self.world
        copies: int = self.world // grad.device_mesh.size()
        for size, placement in zip(grad.device_mesh.shape, grad.placements):
            if placement.is_replicate():
                copies *= size
            elif placement.is_partial():
                raise NotImplementedError(
                    f"A gradient of shape {list(grad.shape)} with placement {placement} is not "
                    "summed over processes yet, so it has no norm."
                )
        return copies


def find_processes(model: nn.Module, group: "dist.ProcessGroup | None") -> Processes:
    """The processes that train ``model``, which includes its DDP and FSDP wrappers.

    Raises:
        NotImplementedError: for FSDP 1, for samples split over processes (context parallelism), and
            for layers that are sharded over different numbers of processes (expert parallelism).
        ValueError: for a group that does not hold all processes of the model.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    members = set(dist.get_process_group_ranks(group))
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise NotImplementedError(
                f"{path or 'the model'} is wrapped by FullyShardedDataParallel (FSDP 1), which "
                "leaves no gradient of a single parameter: use torch.distributed.fsdp.fully_shard "
                "(FSDP 2)"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            _refuse_outside(f"{path or 'the model'}, a DistributedDataParallel,", ranks, members)
    sharded_over, coordinate = fsdp_degrees(model), 0
    degrees: dict[int, str] = {}
    parameters = parameters_at_rest(model)
    refuse_split_samples(model, parameters.values(), members)
    for name, p in parameters.items():
        if is_dtensor(p):
            mesh: Any = p.device_mesh
            _refuse_outside(name, set(mesh.mesh.flatten().tolist()), members)
            degree = mesh.size() // sharded_over.get(id(p), 1)
            degrees.setdefault(degree, name)
            if degree > 1:  # FSDP2 puts its own dimensions before the others
                coordinate = int((mesh.mesh.flatten() == dist.get_rank()).nonzero()[0]) % degree
    several = sorted(degrees.keys() - {1})
    if len(several) > 1:
        raise NotImplementedError(
            f"{degrees[several[0]]} is shared by {several[0]} processes and {degrees[several[1]]} "
            f"by {several[1]}. {SEVERAL_DEGREES}"
        )
    on = Processes(len(members), several[0] if several else 1, coordinate)
    if on.world % on.tensor:
        raise ValueError(
            f"{on.world} processes do not divide into models of {on.tensor} tensor-parallel ones"
        )
    for name, p in parameters.items():
        if sharded_over.get(id(p), on.data) != on.data:
            raise NotImplementedError(
                f"FSDP spreads {name} over {sharded_over[id(p)]} of the {on.data} data-parallel "
                f"processes. {SEVERAL_DEGREES}"
            )
    return on


def gathered(value: Any, group: "dist.ProcessGroup | None") -> list[Any]:
    """``value`` of every process in the group, by rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def shared(value: T, choose: Callable[[T, T], T], groups: Iterable[Any]) -> T:
    """One value of all processes in several groups, such as those of each dimension of a mesh.
    ``choose`` takes one of two. All of these processes must call this.
    """
    for group in groups:
        value = reduce(choose, gathered(value, group))
    return value


def sharding_groups(parameters: Iterable[Any]) -> list[Any]:
    """The groups of processes over which parameters are split. A forward pass needs all of them."""
    found: dict[str, Any] = {}
    for p in filter(is_dtensor, parameters):
        for dim, placement in enumerate(p.placements):
            if placement.is_shard() and p.device_mesh.size(dim) > 1:
                group = p.device_mesh.get_group(dim)
                found[group.group_name] = group
    return list(found.values())


SEVERAL_DEGREES = (
    "gnsfast cannot measure a model whose layers have different degrees of model parallelism yet, "
    "such as expert parallelism."
)


def _refuse_outside(what: str, ranks: set[int], members: set[int]) -> None:
    if not ranks <= members:
        raise ValueError(
            f"{what} is on processes {sorted(ranks)}, but the noise scale is measured over "
            f"{sorted(members)}. Give GradientNoiseScale the process_group of all processes that "
            "train the model, data and model parallel ones together."
        )


def parameters_at_rest(model: nn.Module) -> dict[str, Any]:
    """The model's parameters by name. Those of FSDP2 are the ones that the optimizer has: during a
    pass modules hold others in their place, and also after a pass without backward.
    """
    at_rest: dict[int, Any] = {}
    for _, group in parameter_groups(model):
        for p in group.fsdp_params:
            at_rest |= {id(gathered): p.sharded_param for gathered in gathered_parameters(p)}
    return {name: at_rest.get(id(p), p) for name, p in model.named_parameters()}


def fsdp_degrees(model: nn.Module) -> dict[int, int]:
    """The number of data-parallel processes that FSDP2 spreads each parameter over, by its id."""
    found: dict[int, int] = {}
    for _, group in parameter_groups(model):
        info = group.mesh_info
        size = getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1)
        found |= {id(p.sharded_param): size for p in group.fsdp_params}
    return found

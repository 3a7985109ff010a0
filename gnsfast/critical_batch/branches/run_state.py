# SPDX-License-Identifier: Apache-2.0
"""The state of a training run: what a ``state_dict`` leaves out of it, and that of a run of several
processes.
"""

import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from gnsfast.parallel import is_first, process_count
from gnsfast.tensors import is_dtensor, local_part


def random_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of the global random number generators of Python, torch and, where it is
    imported, NumPy, as plain values and tensors.

    Args:
        devices: of which the CUDA generators are included.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices(devices)],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Put all generators back into the state that ``random_state`` returned.

    Raises:
        ValueError: where the state has another number of CUDA devices.
    """
    cuda = _cuda_devices(devices)
    if len(cuda) != len(state["cuda"]):
        raise ValueError(
            f"the saved random state has {len(state['cuda'])} CUDA devices, but the model is on "
            f"{len(cuda)}: use as many devices as the run that saved it"
        )
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, of_device in zip(cuda, state["cuda"]):
        torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def _cuda_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    """Each CUDA device once, in ascending order."""
    found = {device for device in devices if device.type == "cuda"}
    return sorted(found, key=lambda device: device.index)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of both, with the buffers that the model's ``state_dict`` does not include."""
    saved = model.state_dict()
    others = {name: b for name, b in model.named_buffers() if name not in saved}
    return {"model": saved, "buffers": others, "optimizer": optimizer.state_dict()}


def load_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``state_of`` returned."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state["buffers"] or name not in state["model"]:
                buffer.copy_(state["buffers"][name])


PARTS = ("model", "optimizer")


def save_run(folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Write the state of a model and its optimizer, and ``own`` for each process.

    Each of several processes writes a file: its shards, and the first one also what all of them
    have alike.
    """
    state = own | state_of(model, optimizer)
    if process_count() > 1:
        # Buffers such as batch norm's differ between processes, so each process writes its own.
        state |= {"processes": process_count(), "buffers": dict(model.named_buffers())}
        state |= {part: pytree.tree_map_only(Tensor, _own_part, state[part]) for part in PARTS}
    torch.save(state, folder / _file())


def read_run(folder: Path) -> dict[str, Any]:
    """Read what ``save_run`` wrote for this process.

    Raises:
        ValueError: where another number of processes wrote the folder.
    """
    path, processes = folder / _file(), process_count()
    found = _read(path) if processes == 1 or path.is_file() else {}
    if found.get("processes", 1) != processes:
        raise ValueError(
            f"{folder} was not saved by {processes} processes. Each process has random numbers of "
            "its own, so start as many processes as saved it"
        )
    return found


def load_run(folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Load what ``save_run`` wrote; ``own`` is what ``read_run`` returned."""
    if process_count() > 1:
        alike = _read(folder / _file(0))
        either = lambda mine, first: first if mine is None else mine
        own |= {part: pytree.tree_map(either, own[part], alike[part]) for part in PARTS}
        for name, like in model.state_dict().items():
            own["model"][name] = _whole(own["model"][name], like)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in own["optimizer"]["state"].items():
            values.update({name: _whole(v, parameters[index]) for name, v in values.items()})
    load_state(model, optimizer, own)


def _own_part(t: Any) -> Any:
    """What this process writes of a tensor: its shard of a DTensor, or None where the first process
    writes it.
    """
    if is_dtensor(t):
        return local_part(t), t.placements, t.shape, t.stride()
    return t if is_first() else None


def _whole(saved: Any, like: Any) -> Any:
    """The DTensor of a shard, on the processes of the tensor ``like``."""
    if not isinstance(saved, tuple):
        return saved
    local, placements, shape, stride = saved
    local = local.to(like.device)
    return type(like).from_local(local, like.device_mesh, placements, shape=shape, stride=stride)


def _file(rank: int | None = None) -> str:
    """The file of a process, by default of this one."""
    if process_count() == 1:
        return "run.pt"
    return f"process-{dist.get_rank() if rank is None else rank}.pt"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found

# SPDX-License-Identifier: Apache-2.0
"""The state of a training run: what a ``state_dict`` leaves out of it, and that of a run of several
processes.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gnsfast.parallel import is_first, process_count
from gnsfast.tensors import is_dtensor, local_part
from gnsfast.torch_internals import pytree

PARTS = ("model", "optimizer")


def save_run(folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Write the state of a model, its optimizer and all random generators, and ``own``.

    Each of several processes writes a file: its shards, its buffers (such as batch norm's, which
    differ between processes) and ``own``, and the first one also what all of them have alike. The
    files hold only tensors and plain values.
    """
    state = own | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if process_count() > 1:
        state |= {part: pytree.tree_map_only(Tensor, _own_part, state[part]) for part in PARTS}
    more = {"processes": process_count(), "buffers": dict(model.named_buffers())}
    torch.save(state | more | {"random": _random_state(model)}, folder / _file())


def read_run(folder: Path) -> dict[str, Any]:
    """Read what ``save_run`` wrote for this process.

    Raises:
        ValueError: where another number of processes wrote the folder.
    """
    path = folder / _file()
    saved = _read(path) if path.is_file() else {}
    if saved.get("processes") != process_count():
        raise ValueError(
            f"{folder} was not saved by {process_count()} processes. Each process has random "
            "numbers of its own, so start as many processes as saved it"
        )
    return saved


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
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(own["buffers"][name])
    _set_random_state(own["random"], model)  # last: loading may draw random numbers


def _random_state(model: nn.Module) -> dict[str, Any]:
    """The states of the global generators of torch, Python and, where it is imported, NumPy."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["cuda"] = [torch.cuda.get_rng_state(device) for device in _cuda_devices(model)]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def _set_random_state(state: dict[str, Any], model: nn.Module) -> None:
    if len(cuda := _cuda_devices(model)) != len(state["cuda"]):
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


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    """Each CUDA device of a model once, in ascending order."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    return sorted(devices, key=lambda device: device.index)


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
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved

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

from gnsfast.parallel import process_count
from gnsfast.tensors import is_dtensor


def random_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of the global random number generators of Python, torch and, where it is
    imported, NumPy, as numbers and tensors.

    Args:
        devices: of which the CUDA generators are included.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(internal), gauss],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices(devices)],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.tolist()), *rest]
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
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    for device, of_device in zip(cuda, state["cuda"]):
        torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))


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


FILE, SHARED, MODEL, OPTIMIZER = "run.pt", "shared", "model.", "optimizer."


def save_run(folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Write the state of a model and its optimizer, and ``own`` for each process."""
    if process_count() > 1:
        _save_sharded(folder, model, optimizer, own)
    else:
        torch.save(own | state_of(model, optimizer), folder / FILE)


def read_run(folder: Path) -> dict[str, Any]:
    """Read what ``save_run`` wrote for this process alone.

    Raises:
        ValueError: where another number of processes wrote the folder.
    """
    if process_count() > 1:
        return _read_own(folder)
    found: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    return found


def load_run(folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Load what ``save_run`` wrote; ``own`` is what ``read_run`` returned."""
    if process_count() > 1:
        _load_sharded(folder, model, optimizer, own)
    else:
        load_state(model, optimizer, own)


def _save_sharded(
    folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]
) -> None:
    """Write the model's and the optimizer's state together, and ``own`` for each process.

    ``torch.distributed.checkpoint`` writes a replicated tensor once and a sharded one in parts. Its
    ``get_state_dict`` is not used: it steps an optimizer that has no state, to make one.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    state = optimizer.state_dict()
    tensors = {MODEL + name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    plain: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        plain[index] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{name}"] = value
            else:
                plain[index][name] = value
    save_together(tensors, checkpoint_id=folder / SHARED)
    own = own | {"optimizer": {"state": plain, "param_groups": state["param_groups"]}}
    # Buffers such as batch norm's differ between processes, so each process writes its own.
    own["buffers"] = {name: b.clone() for name, b in model.named_buffers()}
    own["processes"] = dist.get_world_size()
    torch.save(own, folder / _own_file())


def _read_own(folder: Path) -> dict[str, Any]:
    path, processes = folder / _own_file(), dist.get_world_size()
    found = torch.load(path, weights_only=True, map_location="cpu") if path.is_file() else {}
    if found.get("processes") != processes:
        raise ValueError(
            f"{folder} was not saved by {processes} processes. Each process has random numbers of "
            "its own, so start as many processes as saved it"
        )
    return dict(found)


def _load_sharded(
    folder: Path, model: nn.Module, optimizer: Optimizer, own: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.state_dict_loader import load as load_together

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of_model, of_optimizer = model.state_dict(), own["optimizer"]
    tensors: dict[str, Tensor] = {}
    saved = filesystem.FileSystemReader(folder / SHARED).read_metadata().state_dict_metadata
    for key, about in saved.items():
        if key.startswith(MODEL):
            tensors[key] = of_model[key.removeprefix(MODEL)]
            continue
        index, _, name = key.removeprefix(OPTIMIZER).partition(".")
        tensors[key] = _target(about, parameters[int(index)])
        of_optimizer["state"][int(index)][name] = tensors[key]
    load_together(tensors, checkpoint_id=folder / SHARED)
    load_state(model, optimizer, own | {"model": of_model, "optimizer": of_optimizer})


def _target(about: Any, parameter: Tensor) -> Tensor:
    """A tensor for an optimizer's state to be read into, spread as a parameter of its shape."""
    if is_dtensor(parameter) and about.size == parameter.shape:
        return torch.empty_like(parameter, dtype=about.properties.dtype)
    return torch.empty(about.size, dtype=about.properties.dtype)


def _own_file() -> str:
    return f"process-{dist.get_rank()}.pt"

# SPDX-License-Identifier: Apache-2.0
"""Parts of a run's state that ``state_dict`` leaves out, and learning rates that are set."""

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


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


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` does not include."""
    saved = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name not in saved}

# SPDX-License-Identifier: Apache-2.0
"""The random number generators of a process, as plain numbers and tensors."""

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def random_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of Python's, NumPy's (where it is imported) and torch's global generators.

    Args:
        devices: those whose CUDA generators belong to it.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(internal), gauss],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in cuda(devices)],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.tolist()), *rest]
    return state


def set_random_state(state: Mapping[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Put all generators back to where ``random_state`` saw them.

    Raises:
        ValueError: for a state of another number of CUDA devices.
    """
    devices = cuda(devices)
    if len(devices) != len(state["cuda"]):
        raise ValueError(
            f"the state has generators of {len(state['cuda'])} CUDA devices, and the model is on "
            f"{len(devices)}"
        )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    for device, of_device in zip(devices, state["cuda"]):
        torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))


def cuda(devices: Iterable[torch.device]) -> list[torch.device]:
    """The CUDA devices among them, each once, in one order."""
    found = {device for device in devices if device.type == "cuda"}
    return sorted(found, key=lambda device: device.index)

# SPDX-License-Identifier: Apache-2.0
"""The measurements in a checkpoint of transformers' Trainer: a file of tensors beside its own."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gnsfast.estimator import GradientNoiseScale

FILE = "gnsfast.pt"


class SavedMeasurements(TrainerCallback, ExportableState):
    """Saves the measurements as ``FILE``, and in ``trainer_state.json`` that there is one.

    It is a callback of its own, because Trainer's ``restore_callback_states_from_checkpoint``
    would make a new GNSCallback, without its tracker. ``on_save`` is called on every process, as a
    state of sharded parameters needs it.
    """

    def __init__(self, gns: GradientNoiseScale, trainer: Any) -> None:
        self.gns, self._trainer = gns, trainer
        self.midway = False  # also what a train() that raised has left

    def state(self) -> dict[str, Any]:
        return {} if self.midway else {"args": {}, "attributes": {"file": FILE}}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.midway:
            return
        found = self.gns.state_dict()
        if not args.should_save:
            return
        run = Path(self._trainer._get_output_dir(getattr(self._trainer, "_trial", None)))
        path = run / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE
        half = path.with_suffix(".half")
        torch.save(found, half)
        os.replace(half, path)


def load_measurements(gns: GradientNoiseScale, state: Any, folder: str | None) -> None:
    """Continue the measurements of the checkpoint that a run resumes from, if it holds any. If
    their file is lost, a warning says that they begin anew.
    """
    saved = state.stateful_callbacks.get(SavedMeasurements.__name__)
    if not state.global_step or not saved:
        return
    path = Path(folder or "") / FILE
    if not path.is_file():
        warnings.warn(
            f"GNSCallback: the checkpoint lacks {path}, which holds its measurements, so the "
            "window begins anew. Either the run ended while the checkpoint was saved, or the file "
            "was not copied",
            stacklevel=2,
        )
        return
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} cannot be read ({e}): remove it to begin the window anew") from e
    gns.load_state_dict(found)

# SPDX-License-Identifier: Apache-2.0
"""Hands a column of a Trainer's data set over as names of samples. Trainer itself removes columns
that the model does not take, and collators make tensors of what is left.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from gnsfast.integrations.replacing import replaced


class KeepsColumn:
    """A data collator that makes a batch of all other columns, and adds this one as it is: as a
    tensor if it holds whole numbers of 64 bits, which Accelerate can send to other processes, else
    as a list.
    """

    def __init__(self, collator: Callable[[Any], Any], column: str) -> None:
        self.collator, self.column = collator, column
        self.is_sent = False  # one process makes the batches of all

    def __call__(self, features: Sequence[Any]) -> Any:
        if not all(isinstance(f, Mapping) and self.column in f for f in features):
            return self.collator(features)
        others = [{k: v for k, v in f.items() if k != self.column} for f in features]
        names, batch = [f[self.column] for f in features], self.collator(others)
        whole = [int(name) for name in names if isinstance(name, Integral)]
        numbers = len(whole) == len(names) and all(-(2**63) <= name < 2**63 for name in whole)
        if self.is_sent and not numbers:
            raise ValueError(
                f"GNSCallback(ids={self.column!r}): one process sends the batches of an iterable "
                f"data set to the others, and Accelerate cannot send {names[0]!r}. Use a column of "
                "whole numbers of 64 bits, or let each process make its own batches: "
                "TrainingArguments(accelerator_config={'dispatch_batches': False})"
            )
        batch[self.column] = torch.tensor(names) if numbers else names
        return batch


def keep_column(trainer: Any, column: str, is_asked: Callable[[], bool]) -> None:
    """Have the batches that ``trainer`` trains on hold a column, where ``is_asked`` says so."""
    load = trainer.get_train_dataloader

    def loader(*args: Any, **kwargs: Any) -> Any:
        if not is_asked() or takes(trainer, column):
            return load(*args, **kwargs)
        kept = [*trainer._signature_columns, column]
        collator = KeepsColumn(trainer.data_collator, column)
        with replaced(trainer, _signature_columns=kept, data_collator=collator):
            found = load(*args, **kwargs)
        is_dispatched = type(found).__name__ == "DataLoaderDispatcher"
        collator.is_sent = is_dispatched and trainer.accelerator.num_processes > 1
        return found

    trainer.get_train_dataloader = loader


def takes(trainer: Any, column: str) -> bool:
    """Whether the model has an argument of this name. Trainer then leaves the column in."""
    trainer._set_signature_columns_if_needed()
    return column in trainer._signature_columns


def names_of(trainer: Any, inputs: Any, column: str) -> Any:
    """The column of a batch. It is taken out, unless the model has an argument of its name."""
    if column not in inputs:
        raise ValueError(
            f"GNSCallback(ids={column!r}): the batch has {', '.join(inputs)}, but no {column!r}. "
            "The data set needs a column of that name, and the callback must be among those that "
            "the Trainer is made with, Trainer(callbacks=[...]), so that it can keep the column. "
            "Where a get_train_dataloader() of your own makes the batches, its collator must keep "
            "it"
        )
    return inputs[column] if takes(trainer, column) else inputs.pop(column)

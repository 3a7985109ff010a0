# SPDX-License-Identifier: Apache-2.0
"""Sees the batch that a model gets in an open block, where its table is still to be learnt."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import guard
from gnsfast.eager import EAGER
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.following import Followed, Hook
from gnsfast.functional import Ragged
from gnsfast.table.learn import table_of
from gnsfast.table.proof import NOT_FINITE
from gnsfast.table.samples import Take
from gnsfast.tensors import tensors_of
from gnsfast.torch_internals import compiled_module, is_compiler_loaded


class BatchHook:
    """Learns the table of an open model from the first batch that ``caller``, the model or a
    wrapper of it, gets in a block of so many ``samples``, which ``take`` cuts out. Of packed
    documents it also tells how many rows of the batch hold them. ``learned()`` is called when
    there is a new table.
    """

    def __init__(
        self,
        followed: Followed,
        caller: nn.Module,
        samples: int,
        ragged: Ragged | None,
        learned: Callable[[], None],
        take: Take | None = None,
    ) -> None:
        self._followed, self._samples, self._ragged = followed, samples, ragged
        self._learned, self._take = learned, take
        self._release: Callable[[], object] | None = None
        if followed.table is None and is_compiler_loaded():
            if compiled_module(caller) is None:  # whose hooks run in eager mode
                self._release = EAGER.hold(self)
        hook = Hook(self._show)
        self._handle = caller.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    @staticmethod
    def is_needed(followed: Followed, samples: int, ragged: Ragged | None) -> bool:
        """Whether an open model has to see its batch: no table was learnt, or none in training
        mode. A single sample has nothing to tell apart.
        """
        table, several = followed.table, samples > 1 or bool(followed.structure.groups)
        trains = followed.structure.model.training
        is_new = table is None or not table.batches or (trains and not table.is_trained)
        is_other = table is not None and not table.has_even  # no batch of a row for each sample
        return ragged is not None or is_other or (is_new and several)

    def remove(self) -> None:
        """See no batch any more."""
        self._handle.remove()
        if self._release is not None:
            self._release()

    def _show(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        followed = self._followed
        if followed.is_learning or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        try:
            self._learn(module, args, kwargs)
        except Exception as error:
            self._handle.remove()
            if not guard.takes(error):
                raise

    def _learn(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        followed, ragged = self._followed, self._ragged
        rows, batch = self._samples, (args, kwargs)
        name = type(followed.structure.model).__name__
        if ragged is not None:
            rows = 1
            if ragged.is_packed:
                rows = rows_of(tensors_of(batch), ragged.maps[0].size, name)
            for leaf in followed.leaves:
                leaf.rows = rows
            table = followed.table
            if table is not None and table.has_ragged and (table.is_trained or not module.training):
                return
        self._handle.remove()  # compiled code goes on in eager mode to the end of the block
        model = followed.structure.model
        run = lambda b: model(*b[0], **b[1])  # noqa: E731
        table = table_of(followed, run, batch, rows, self._take, ragged)
        if not table.proofs and any(why.endswith(NOT_FINITE) for why in table.left_out.values()):
            raise ObservationError(
                f"{name}: {NOT_FINITE} in the first batch, so nothing was learnt from it. The next "
                "block learns anew."
            )
        (table if followed.table is None else followed.table | table).tell(followed)
        log = logging.getLogger("gnsfast")
        log.log(logging.WARNING if table.left_out else logging.INFO, "%s", table.summary())
        self._learned()


def rows_of(tensors: list[Tensor], tokens: int, name: str) -> int:
    """How many rows of a batch hold packed documents of so many tokens.

    Raises:
        SampleShapeError: if no tensor has so many tokens in its leading dimensions.
    """
    for t in tensors:
        for d in (1, 2)[: t.ndim]:
            if t.shape[:d].numel() == tokens:
                return t.shape[: d - 1].numel()
    shapes = ", ".join(str([*t.shape]) for t in tensors[:4])
    raise SampleShapeError(
        f"{name}: cu_seqlens ends at token {tokens}, but the model got tensors of shape {shapes}, "
        "none of which has so many tokens in its leading dimensions. If padding follows, add it as "
        "a last document."
    )

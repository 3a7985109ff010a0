# SPDX-License-Identifier: Apache-2.0
"""Modules that are given the rows of a whole batch."""

import torch
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.layers.drop_in import DropIn


class BatchRows(DropIn):
    """A module that is given the rows of a whole batch, [N, H], by the block around it."""

    def _sample_of(self, x_NH: Tensor) -> Tensor:
        """[N]: which sample each row is of."""
        B, N, layout = self._measured.samples, len(x_NH), self.gnsfast.layout
        known, T = layout.flattened or layout.fold or B == 1, N // B if B else 0
        if T * B != N or not known:
            hint = (
                " Whether these are those of the batch in its order is not known of the block "
                f"around it: if they are, say convert(model, fold=[{self._measured.name!r}])."
            )
            raise self._shape_error(x_NH, f"it has {N} rows.{'' if known else hint}")
        row_N = torch.arange(N, device=x_NH.device)
        return row_N % max(B, 1) if self._interleaved() else row_N // max(T, 1)

    def _interleaved(self) -> bool:
        """Whether the rows are those of [T, B, H], flattened."""
        layout = self.gnsfast.layout
        return layout.flattened and layout.batch_dim == 1

    def _refuse(self, reason: str, remedy: str = "") -> ObservationError:
        return ObservationError(
            f"{self._measured.name} ({type(self).__name__}): {reason}. "
            + (remedy or f"Leave it out: convert(model, exclude=[{self._measured.name!r}]).")
        )

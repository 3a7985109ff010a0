# SPDX-License-Identifier: Apache-2.0
"""The base of drop-ins whose input is the rows of a whole batch."""

import torch
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.functional import documents_of_rows
from gnsfast.layers.drop_in import DropIn


class BatchRows(DropIn):
    """A module that the block around it calls with the rows of a whole batch, [N, H]."""

    def _sample_of(self, x_NH: Tensor) -> Tensor:
        """[N]: the sample of each row."""
        opened, layout = self._measured, self.gnsfast.layout
        B, N, packed = opened.samples, len(x_NH), opened.documents is not None
        known, T = layout.flattened or layout.fold or B == 1, N // B if B else 0
        if packed and known:
            return documents_of_rows(self._starts(x_NH, features=1), N)
        if T * B != N or not known:
            hint = (
                " gnsfast does not know whether the block around it keeps the rows of the batch "
                f"in their order. If it does, call convert(model, fold=[{self._measured.name!r}])."
            )
            raise self._shape_error(x_NH, f"dimension 0 has size {N}.{'' if known else hint}")
        row_N = torch.arange(N, device=x_NH.device)
        return row_N % max(B, 1) if self._interleaved() else row_N // max(T, 1)

    def _interleaved(self) -> bool:
        """Whether the rows are a flattened [T, B, H]."""
        layout = self.gnsfast.layout
        return layout.flattened and layout.batch_dim == 1

    def _refuse(self, reason: str, remedy: str = "") -> ObservationError:
        return ObservationError(
            f"{self._measured.name} ({type(self).__name__}): {reason}. "
            + (remedy or f"Leave it out: convert(model, exclude=[{self._measured.name!r}]).")
        )

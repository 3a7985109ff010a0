# SPDX-License-Identifier: Apache-2.0
"""What all drop-ins share that stand for a layer with a forward of its own."""

from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.layers.drop_in import DropIn, Opened


class OwnForward(DropIn):
    """Mixin of drop-ins for layers whose own forward does what a kernel does, as long as their
    settings are those that ``convert`` has seen.
    """

    def _measuring(self) -> Opened | None:
        opened = super()._measuring()
        if opened is not None and self.gnsfast.settings:
            self._refuse_other_settings(opened)
        return opened

    def _refuse_other_settings(self, opened: Opened) -> None:
        for name, kind, value in self.gnsfast.settings:
            found = getattr(self, name, None)
            found = getattr(found, "__func__", found)  # of a method
            tensor = isinstance(found, Tensor)
            if (
                (not tensor and found == value)
                if kind is None
                else isinstance(found, kind) == value
            ):
                continue
            what = f"is a {type(found).__name__}" if tensor else f"is {found!r}"
            raise ObservationError(
                f"{opened.name} ({type(self).__name__}): {name} {what}, which was otherwise when "
                "gnsfast.convert chose a kernel for its forward, so the norms would be those of "
                "another layer. After such a change call gnsfast.convert(model) again."
            )

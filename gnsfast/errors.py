# SPDX-License-Identifier: Apache-2.0
"""What gnsfast raises when a number would be wrong."""


class SampleShapeError(ValueError):
    """A module cannot tell which rows of its input belong to which sample."""


class ObservationError(RuntimeError):
    """The backward pass did not go through a module exactly once, so its norms would be wrong."""


class BranchError(RuntimeError):
    """Branches of a training run do not give a critical batch size."""

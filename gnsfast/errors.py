# SPDX-License-Identifier: Apache-2.0
"""Exceptions that gnsfast raises instead of returning a wrong number."""


class SampleShapeError(ValueError):
    """The shape of an input does not show which rows belong to which sample."""


class ObservationError(RuntimeError):
    """Norms would be wrong, for example because a module ran twice, or because a gradient was
    changed after the backward pass.
    """


class BranchError(RuntimeError):
    """The branches of a training run do not give a critical batch size."""

# SPDX-License-Identifier: Apache-2.0
"""Exceptions that gnsfast raises instead of returning a wrong number."""


class SampleShapeError(ValueError):
    """The shape of an input does not show which of its rows belong to which sample."""


class ObservationError(RuntimeError):
    """Norms would be wrong: a module ran twice, say, or a gradient was changed after backward."""


class BranchError(RuntimeError):
    """The branches of a training run give no critical batch size."""

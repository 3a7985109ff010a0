# SPDX-License-Identifier: Apache-2.0
"""Exceptions that gnsfast raises instead of returning a wrong number."""


class SampleShapeError(ValueError):
    """The shape of an input does not show which of its rows belong to which sample."""


class ObservationError(RuntimeError):
    """The passes or gradients of an update are not those that its norms need."""


class BranchError(RuntimeError):
    """The branches of a training run give no critical batch size."""

# SPDX-License-Identifier: Apache-2.0
"""Exceptions that gnsfast raises instead of returning a wrong number."""


class SampleShapeError(ValueError):
    """The shape of an input does not show which rows belong to which sample."""


class AmbiguousRowsError(ValueError):
    """Rows of two kinds have the same number in this batch by chance, which is no mistake."""


class ObservationError(RuntimeError):
    """Norms would be wrong, for example because a module ran twice, or because a gradient was
    changed after the backward pass.
    """


class BranchError(RuntimeError):
    """The branches of a training run do not give a critical batch size."""


def first_line(error: BaseException) -> str:
    """The beginning of an error's message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

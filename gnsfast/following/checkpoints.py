# SPDX-License-Identifier: Apache-2.0
"""Torch's activation checkpoints, which run a part of a model again in backward."""

from gnsfast.torch_internals import FIRST_FORWARD, SECOND_FORWARD, in_backward, saves_for


def saves_nothing() -> bool:
    """Whether the first forward of a non-reentrant checkpoint runs. To ask its graph for a tensor
    would run it once more.
    """
    return saves_for(FIRST_FORWARD)


def recomputing() -> bool:
    """Whether a non-reentrant checkpoint runs its forward again, whose graph is never used."""
    return in_backward() and saves_for(SECOND_FORWARD)

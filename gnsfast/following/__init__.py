# SPDX-License-Identifier: Apache-2.0
"""Follows the trainable parameters of a model as it is, through every function that takes them."""

from gnsfast.following.coverage import Coverage, CoverageRow, coverage
from gnsfast.following.hooks import Hook
from gnsfast.following.leaf import NOTHING, Facts, Leaf, unfollowed
from gnsfast.following.model import Followed
from gnsfast.following.options import EXCLUDED, set_excluded
from gnsfast.following.passes import Rows

__all__ = [
    "EXCLUDED",
    "NOTHING",
    "Coverage",
    "CoverageRow",
    "Facts",
    "Followed",
    "Hook",
    "Leaf",
    "Rows",
    "coverage",
    "set_excluded",
    "unfollowed",
]

# SPDX-License-Identifier: Apache-2.0
"""Follows the trainable parameters of a model as it is, through every function that takes them, and
executes its table.
"""

from gnsfast.following.dispatch import takes_functions
from gnsfast.following.functions import (
    CASTS,
    COPIES,
    OPENED,
    QUERIES,
    name_of,
    numbered,
    of_torch,
)
from gnsfast.following.hooks import Hook
from gnsfast.following.layouts import FIRST, SHARED, UNKNOWN, Layout, Place
from gnsfast.following.leaf import (
    NO_ROWS,
    NOTHING,
    Facts,
    Leaf,
    Row,
    expression_of,
)
from gnsfast.following.model import Followed
from gnsfast.following.options import EXCLUDED, set_excluded
from gnsfast.following.owners import mark_made, owners_of
from gnsfast.following.passes import Rows, Weighted, fill_probes, gradients
from gnsfast.following.wrappers import unwrapped
from gnsfast.torch_internals import unfollowed

__all__ = [
    "CASTS",
    "COPIES",
    "EXCLUDED",
    "FIRST",
    "NOTHING",
    "NO_ROWS",
    "OPENED",
    "QUERIES",
    "SHARED",
    "UNKNOWN",
    "Facts",
    "Followed",
    "Hook",
    "Layout",
    "Leaf",
    "Place",
    "Row",
    "Rows",
    "Weighted",
    "expression_of",
    "fill_probes",
    "gradients",
    "mark_made",
    "name_of",
    "numbered",
    "of_torch",
    "owners_of",
    "set_excluded",
    "takes_functions",
    "unfollowed",
    "unwrapped",
]

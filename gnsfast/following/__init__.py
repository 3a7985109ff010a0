# SPDX-License-Identifier: Apache-2.0
"""Follows the trainable parameters of a model as it is, through every function that takes them, and
executes its table.
"""

from gnsfast.following.dispatch import takes_functions as takes_functions
from gnsfast.following.functions import CASTS as CASTS
from gnsfast.following.functions import COPIES as COPIES
from gnsfast.following.functions import ELEMENTWISE as ELEMENTWISE
from gnsfast.following.functions import KEEPS as KEEPS
from gnsfast.following.functions import LOOKUPS as LOOKUPS
from gnsfast.following.functions import OPENED as OPENED
from gnsfast.following.functions import PIECES as PIECES
from gnsfast.following.functions import QUERIES as QUERIES
from gnsfast.following.functions import name_of as name_of
from gnsfast.following.functions import numbered as numbered
from gnsfast.following.functions import of_torch as of_torch
from gnsfast.following.hooks import Hook as Hook
from gnsfast.following.layouts import FIRST as FIRST
from gnsfast.following.layouts import RAGGED as RAGGED
from gnsfast.following.layouts import SHARED as SHARED
from gnsfast.following.layouts import UNKNOWN as UNKNOWN
from gnsfast.following.layouts import Layout as Layout
from gnsfast.following.layouts import Place as Place
from gnsfast.following.leaf import NO_ROWS as NO_ROWS
from gnsfast.following.leaf import Facts as Facts
from gnsfast.following.leaf import Leaf as Leaf
from gnsfast.following.leaf import Row as Row
from gnsfast.following.leaf import expression_of as expression_of
from gnsfast.following.model import Followed as Followed
from gnsfast.following.options import EXCLUDED as EXCLUDED
from gnsfast.following.options import set_excluded as set_excluded
from gnsfast.following.owners import Owners as Owners
from gnsfast.following.owners import mark_made as mark_made
from gnsfast.following.owners import owners_of as owners_of
from gnsfast.following.passes import Rows as Rows
from gnsfast.following.passes import Weighted as Weighted
from gnsfast.following.passes import fill_probes as fill_probes
from gnsfast.following.passes import gradients as gradients
from gnsfast.following.structure import Structure as Structure
from gnsfast.following.wrappers import unwrapped as unwrapped
from gnsfast.torch_internals import unfollowed as unfollowed

# SPDX-License-Identifier: Apache-2.0
"""Layers as functions, whose backward pass also yields every sample's squared gradient norm, as the
gradient of a ``probe``.

A probe is a float32 leaf of zeros, [P, B + 2], with a row for each trainable parameter of the
layer, in the order weight, bias. After backward each row of ``probe.grad`` holds the squared norms
of the B samples, the squared norm of the batch's gradient, and the number of calls, which is 1.0. A
``Plan`` says which rows of the input belong to which sample, and what else is measured. The outputs
are those of ``torch.nn.functional``.
"""

from gnsfast.functional._attention import attention
from gnsfast.functional._autocast import autocast_dtype as autocast_dtype
from gnsfast.functional._autocast import backward_pass as backward_pass
from gnsfast.functional._autocast import graphs_of_gradients as graphs_of_gradients
from gnsfast.functional._beside import beside as beside
from gnsfast.functional._beside import passed_on as passed_on
from gnsfast.functional._beside import stand_in as stand_in
from gnsfast.functional._bilinear import bilinear
from gnsfast.functional._channel_norm import channel_norm
from gnsfast.functional._conv import conv
from gnsfast.functional._cross_entropy import linear_cross_entropy
from gnsfast.functional._embedding import embedding
from gnsfast.functional._embedding_bag import embedding_bag
from gnsfast.functional._experts import grouped_linear
from gnsfast.functional._linear import linear
from gnsfast.functional._links import Link as Link
from gnsfast.functional._norms import layer_norm, rms_norm
from gnsfast.functional.plan import Plan
from gnsfast.functional.ragged import Ragged as Ragged
from gnsfast.functional.ragged import RowMap as RowMap
from gnsfast.functional.ragged import cu_seqlens as cu_seqlens
from gnsfast.functional.ragged import map_of as map_of
from gnsfast.functional.ragged import ragged_of as ragged_of
from gnsfast.ops import Groups

__all__ = [
    "Groups",
    "Plan",
    "attention",
    "bilinear",
    "channel_norm",
    "conv",
    "embedding",
    "embedding_bag",
    "grouped_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
]

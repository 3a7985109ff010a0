# SPDX-License-Identifier: Apache-2.0
"""Follows the trainable parameters of a model as it is, through every function that takes them."""

from gnsfast.following.learning import batch_norms
from gnsfast.following.model import Followed

__all__ = ["Followed", "batch_norms"]

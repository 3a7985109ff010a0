# SPDX-License-Identifier: Apache-2.0
"""The door to ``families/models.py`` for ``tests/following/test_families.py``."""

from benchmarks.families.models import Family

__all__ = ["Family"]

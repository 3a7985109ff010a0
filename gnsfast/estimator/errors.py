# SPDX-License-Identifier: Apache-2.0
"""What becomes of an error in a measured update."""

import logging
import re

LOG = logging.getLogger("gnsfast")

MOST = 100
"""So many kinds of errors are told. A message may hold numbers that are always others."""


class Errors:
    """Counts the updates that errors of gnsfast have dropped, and logs each kind of error once.
    ``in_a_row`` also counts measured updates that errors of the user have ended.
    """

    def __init__(self) -> None:
        self.count = self.in_a_row = 0
        self._told: set[str] = set()

    def add(self, error: Exception) -> None:
        """Note an error that has dropped an update."""
        self.count += 1
        self.in_a_row += 1
        kind = re.sub(r"\d+", "0", f"{type(error).__name__}: {error}")
        if kind in self._told or len(self._told) >= MOST:
            return
        self._told.add(kind)
        LOG.warning(
            "An update was not measured. Training goes on. The reason, which is not told again: %s",
            f"{type(error).__name__}: {error}",
            exc_info=error,
        )

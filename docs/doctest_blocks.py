# SPDX-License-Identifier: Apache-2.0
"""Docstrings' ``>>>`` examples as code; Markdown takes them for quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^>>> (?:.+\n?)+")


class DoctestBlocks(griffe.Extension):
    """Fences every example before the page is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                obj.docstring.value,
            )

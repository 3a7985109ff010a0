# SPDX-License-Identifier: Apache-2.0
"""Names the theme's search for screen readers: it is a dialog without a label."""

from typing import Any

DIALOG = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **kwargs: Any) -> str:
    return output.replace(DIALOG, f'{DIALOG} aria-label="Search"')

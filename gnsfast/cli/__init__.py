# SPDX-License-Identifier: Apache-2.0
"""The ``gnsfast`` command."""

import sys


def main() -> None:
    """Entry point; says what to install where the extra ``cli`` is missing."""
    try:
        from gnsfast.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("jinja2", "plotly", "rich", "typer"):
            raise
        sys.exit(f"gnsfast: {missing.name} is not installed: pip install 'gnsfast[cli]'")
    app()

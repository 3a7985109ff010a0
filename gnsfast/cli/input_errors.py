# SPDX-License-Identifier: Apache-2.0
"""Bad input is one line on stderr and exit status 2, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gnsfast.errors import BranchError


@contextmanager
def input_errors() -> Iterator[None]:
    """Wrap what reads and checks the user's input: its errors become that one line."""
    try:
        yield
    except (ValueError, OSError, BranchError) as error:
        typer.echo(f"gnsfast: {error}", err=True)
        raise typer.Exit(2) from None

# SPDX-License-Identifier: Apache-2.0
"""Turns bad input into one line on stderr and exit status 2, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gnsfast.errors import BranchError


@contextmanager
def input_errors() -> Iterator[None]:
    """Wrap code that reads and checks the user's input, so that its errors become that line."""
    try:
        yield
    except (ValueError, OSError, BranchError) as error:
        typer.echo(f"gnsfast: {error}", err=True)
        raise typer.Exit(2) from None

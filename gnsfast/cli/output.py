# SPDX-License-Identifier: Apache-2.0
"""What a command answers: text, or with ``--json`` one JSON object on stdout, errors too."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from gnsfast.cli.options import BadInput
from gnsfast.cli.terminal import show
from gnsfast.errors import BranchError
from gnsfast.interval import Interval

USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error for an option that is missing or unknown; it has no public name."""

UNITS = {
    "against": "against_samples",
    "b_crit": "critical_batch_samples",
    "batch": "batch_size_samples",
    "batch_size": "batch_size_samples",
    "context": "tokens_per_sample",
    "params": "parameters",
    "range": "range_tokens",
    "threshold": "threshold_tokens",
    "whole_run": "whole_run_samples",
}
"""Names within the package, and those of the JSON, which say their units."""


class Command(typer.core.TyperCommand):
    """Bad input is one line on stderr, or with ``--json`` one object on stdout, and exit status
    2.
    """

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
        with input_errors("--json" in args):
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        with input_errors(ctx.params.get("as_json", False)):
            return super().invoke(ctx)


@contextmanager
def input_errors(as_json: bool) -> Iterator[None]:
    """Turn bad input into an answer without a traceback, and exit status 2."""
    try:
        yield
    except (BadInput, ValueError, OSError, BranchError) as error:
        message = str(error)
    except USAGE as error:
        if not as_json:
            raise
        message = error.format_message()  # type: ignore[attr-defined]
    else:
        return
    if as_json:
        print_json({"kind": "error", "message": message, "exit_status": 2})
    else:
        typer.echo(f"gnsfast: {message}", err=True)
    raise typer.Exit(2)


def answer(name: str, found: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or what the template with this name makes of it."""
    if as_json:
        print_json(found)
    else:
        show(name, found, Console())


def print_json(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(plain(found), allow_nan=False))


def plain(value: Any) -> Any:
    """For JSON: units in the names, an interval with names, null for an end that is infinite."""
    if isinstance(value, Interval):
        return value.record()
    if isinstance(value, dict):
        return {UNITS.get(name, name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value

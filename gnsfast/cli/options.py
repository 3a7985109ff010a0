# SPDX-License-Identifier: Apache-2.0
"""Options of commands, each said once: a field with its help and what reads its text."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from typing import Any, get_type_hints

import typer

from gnsfast.arguments import whole_number
from gnsfast.counts import parse_count, parse_number
from gnsfast.errors import BranchError
from gnsfast.interval import Interval

REQUIRED: Any = MISSING
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def option(
    help: str,
    read: Callable[[str, str], Any] | None = None,
    default: Any = None,
    *,
    of: Callable[..., Any] = typer.Option,
    **more: Any,
) -> Any:
    """A field of a class of options.

    Args:
        read: makes the field from the text and the name of the option, which errors name.
        default: the text without the option, or ``REQUIRED``; False of a flag, which takes no text.
        of: ``typer.Argument`` for an argument.
        more: for Typer.
    """
    own = {"read": read, "of": of, "help": help}
    return field(default=default, kw_only=default is MISSING, metadata=own | more)


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn bad input into one line on stderr and exit status 2, without a traceback."""
    try:
        yield
    except (ValueError, OSError, BranchError) as error:
        typer.echo(f"gnsfast: {error}", err=True)
        raise typer.Exit(2) from None


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first argument is an object of the class ``options``."""
    types, own = get_type_hints(options), []
    for each in fields(options):
        more = dict(each.metadata)
        read, of = more.pop("read"), more.pop("of")
        kind, name = types[each.name], "--" + each.name.replace("_", "-")
        if read is not None:
            kind = str if each.default is not None else str | None
            more["parser"] = _reader(read, name)
        names = [name] if each.default is False else []  # or a flag would have a --no-
        default = of(... if each.default is MISSING else each.default, *names, **more)
        own.append(inspect.Parameter(each.name, KEYWORD, default=default, annotation=kind))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            with input_errors():
                made = options(**{each.name: given.pop(each.name) for each in own})
            function(made, **given)

        rest = [*inspect.signature(function).parameters.values()][1:]
        rest = [each.replace(kind=KEYWORD) for each in rest]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature([*own, *rest])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in (*own, *rest)}
        return command

    return decorate


def _reader(read: Callable[[str, str], Any], name: str) -> Callable[[str], Any]:
    def reader(text: str) -> Any:
        with input_errors():
            return read(text, name)

    return reader


def positive(text: str, name: str) -> float:
    """From "20B", a number above 0."""
    value = float(parse_number(text, name))
    if value == 0:
        raise ValueError(f"{name} is 0, but must be positive")
    return value


def whole(text: str, name: str) -> int:
    """From "4K", a whole number above 0."""
    return whole_number(name, parse_count(text, name))


def interval(text: str, name: str) -> Interval:
    """From "4096" or "4096:2048:8192", the value and its interval."""
    parts = [positive(part, name) for part in text.split(":")]
    if len(parts) not in (1, 3):
        raise ValueError(f"{name} is {text!r}, but must be VALUE or VALUE:LOWER:UPPER")
    return Interval(*parts) if len(parts) == 3 else Interval(*parts * 3)


def point(text: str, name: str) -> tuple[float, float]:
    """From "3B:512", tokens and samples."""
    tokens, colon, samples = text.partition(":")
    if not colon:
        raise ValueError(f"{name} is {text!r}, but must be TOKENS:SAMPLES, such as 3B:512")
    return positive(tokens, name), positive(samples, name)


def pairs(text: str, name: str) -> dict[int, float]:
    """From "1024:2.1 2048:3.9", numbers by batch size."""
    found = {}
    for entry in text.split():
        size, colon, value = entry.partition(":")
        if not colon:
            raise ValueError(f"{name} holds {entry!r}: write SAMPLES:SECONDS, such as 1024:2.1")
        found[parse_count(size, name)] = float(parse_number(value, name))
    return found

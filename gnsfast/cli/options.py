# SPDX-License-Identifier: Apache-2.0
"""Options of commands: the fields of a class, whose docstring says what each of them is."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from gnsfast.arguments import whole_number
from gnsfast.counts import parse_count, parse_number
from gnsfast.interval import Interval

KEYWORD = inspect.Parameter.KEYWORD_ONLY


class BadInput(Exception):
    """The text of an option means nothing. No ValueError: Typer would drop its message."""


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first argument is an object of the class ``options``.

    Each field is an option with the help text that the class has under ``Args:``. The type
    ``Annotated[float, positive]`` says that ``positive`` makes the field from its text and the name
    of the option, which errors name, and ``Annotated[str, Argument]`` that the field is an
    argument. The metadata of a field goes to Typer.
    """
    types, own = get_type_hints(options, include_extras=True), []
    said = re.findall(r"^    (\w+): (.*(?:\n {5}.*)*)", inspect.getdoc(options) or "", re.M)
    helps = {name: " ".join(text.split()) for name, text in said}
    for each in fields(options):
        kind, name, default = types[each.name], "--" + each.name.replace("_", "-"), each.default
        marks = [m for part in (kind, *get_args(kind)) for m in getattr(part, "__metadata__", ())]
        of: Any = typer.Argument if typer.Argument in marks else typer.Option
        more = {"help": helps.get(each.name), **each.metadata}
        if marks and of is typer.Option:
            kind = str if default is not None else str | None
            more["parser"] = _reader(marks[0], name)
            if default not in (None, MISSING):
                default = ",".join(map(str, default if isinstance(default, tuple) else [default]))
        names = [name] if default is False else []  # or a flag would have a --no-
        default = of(... if default is MISSING else default, *names, **more)
        own.append(inspect.Parameter(each.name, KEYWORD, default=default, annotation=kind))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
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
        try:
            return read(text, name)
        except ValueError as error:
            raise BadInput(str(error)) from None

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


Count = Annotated[int, parse_count]
Positive = Annotated[float, positive]
Whole = Annotated[int, whole]
Span = Annotated[Interval, interval]
Point = Annotated[tuple[float, float], point]

# SPDX-License-Identifier: Apache-2.0
"""Options as fields of a class: what a command gets of them, and what it says of bad ones."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gnsfast.cli.options import Span, Whole, pairs, point, takes
from gnsfast.cli.output import Command
from gnsfast.interval import Interval

app = typer.Typer()


def several(text: str, name: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class Options:
    """What is asked.

    Args:
        tokens: Tokens.
        batch_size: The batch size, of which this text says more than there is room for in a
            line.
        out: Folder.
        share: Share.
        often: Often.
    """

    tokens: Whole
    batch_size: Span | None = None
    processes: Whole = 1
    sizes: Annotated[tuple[int, ...], several] = (1, 2)
    out: Path | None = None
    share: float = field(default=0.5, metadata={"max": 1.0})
    often: bool = False

    def __post_init__(self) -> None:
        if self.often and self.out is None:
            raise ValueError("--often needs --out")


@app.command(cls=Command)
@takes(Options)
def command(options: Options, as_json: bool = False) -> None:
    """Says what it got."""
    typer.echo(f"{options} {as_json}")


def invoke(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.stderr


def test_a_command_gets_what_the_text_means() -> None:
    assert invoke("--tokens", "4K").strip() == f"{Options(tokens=4000, processes=1)} False"
    said = invoke(
        *("--tokens", "4096", "--batch-size", "4:3:5", "--processes", "2", "--out", "x"),
        *("--share", "0.25", "--often", "--as-json"),
    )
    all_of_them = Options(
        tokens=4096,
        batch_size=Interval(4.0, 3.0, 5.0),
        processes=2,
        out=Path("x"),
        share=0.25,
        often=True,
    )
    assert said.strip() == f"{all_of_them} True"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "1.5"), "gnsfast: --tokens is '1.5', but must be a whole number"),
        (("--tokens", "0"), "gnsfast: --tokens must be a whole number of at least 1, not 0"),
        (("--tokens", "4", "--batch-size", "4:3"), "gnsfast: --batch-size is '4:3', but must be V"),
        (("--tokens", "4", "--processes", "x"), "gnsfast: --processes is 'x', but must be a num"),
        (("--tokens", "4", "--often"), "gnsfast: --often needs --out"),
    ],
)
def test_errors_name_the_option_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    found = invoke(*arguments, code=2)
    assert found.startswith(said) and found.count("\n") == 1


def test_typer_says_the_rest() -> None:
    assert "Missing option '--tokens'" in invoke(code=2)
    assert "--share" in invoke("--tokens", "4", "--share", "2", code=2)
    said = invoke("--help")
    assert "--batch-size" in said and "[default: 1]" in said and "--no-often" not in said
    assert "[default: 1,2]" in said
    assert "more than there is room for in a line." in " ".join(said.replace("│", " ").split())


def test_pairs_and_points() -> None:
    assert pairs("1024:2.1 2K:3", "--x") == {1024: 2.1, 2000: 3.0}
    assert point("3B:512", "--x") == (3e9, 512.0)
    with pytest.raises(ValueError, match="--x holds '5': write SAMPLES:SECONDS"):
        pairs("5", "--x")
    with pytest.raises(ValueError, match="--x is '3B', but must be TOKENS:SAMPLES"):
        point("3B", "--x")

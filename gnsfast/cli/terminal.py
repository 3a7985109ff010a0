# SPDX-License-Identifier: Apache-2.0
"""What commands print: a template for each in ``templates/``, in rich's markup."""

from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gnsfast.cli.words import page


def show(name: str, found: dict[str, Any], console: Console) -> None:
    """Print the paragraphs and tables of a template that knows ``found``. Lines that begin with |
    are a table as Markdown writes it, lines that begin with > are text that is neither markup nor
    wrapped.
    """
    lines = page(name).render(found).removesuffix("\n").split("\n")
    for kind, group in groupby(lines, lambda line: line[:1] if line[:1] in "|>" else ""):
        if kind == "|":
            console.print(_table(*group))
        elif kind == ">":
            console.print(Text("\n".join(line[2:] for line in group)), soft_wrap=True)
        else:
            console.print(Text.from_markup("\n".join(group), emoji=False))


def _table(*lines: str) -> Table:
    """Its row of dashes says how wide each column is at least, and on which side its text stands;
    above it there may be a head.
    """
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    head = rows.pop(0) if "--" not in rows[0][0] else []
    table = Table(box=box.SIMPLE_HEAD if head else None, pad_edge=False, show_edge=False)
    table.show_header = bool(head)
    for dashes, name in zip(rows[0], head or rows[0]):
        side: Any = "right" if dashes.endswith(":") else "left"
        table.add_column(name, justify=side, min_width=len(dashes), overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table

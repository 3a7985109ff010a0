# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks readme``: writes what the newest record says between ``<!-- benchmarks:
NAME -->`` and ``<!-- end -->`` in README.md, and the figure, and for the name ``processors`` what
all records say; ``--check`` only compares.
"""

import argparse
import json
import os
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from benchmarks import figures, processors, record
from benchmarks.figures import OURS, Steps
from benchmarks.record import Record

README = record.RESULTS.parents[1] / "README.md"
BUDGETS = record.RESULTS.parent / "budgets"
MARKED = re.compile(r"(<!-- benchmarks: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PROCESSORS = "processors"
"""The block that is of all records."""
WIDTH = 120
ROWS = 3
"""Most rows of the table; the others are named below it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--check", action="store_true", help="exit status 1 where they differ")


def run(options: argparse.Namespace) -> None:
    try:
        stale = update(README, record.RESULTS, options.check)
    except (ValueError, OSError) as error:
        print(f"benchmarks readme: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for path in stale:
        print(f"{path}: {'not what the records give' if options.check else 'written'}")
    if stale and options.check:
        print("rewrite them: python -m benchmarks readme", file=sys.stderr)
        raise SystemExit(1)


def update(readme: Path, results: Path, check: bool = False) -> list[Path]:
    """The files that differ from what the records give; written, unless it is a ``check``."""
    text = readme.read_text(encoding="utf-8")
    names = {marked[1] for marked in MARKED.findall(text)} - {PROCESSORS}
    found = {name: _newest(name, results) for name in names}
    if not found:
        raise ValueError(f"{readme} has no lines <!-- benchmarks: cpu --> and <!-- end -->")

    def written(marked: re.Match[str]) -> str:
        if marked[2] == PROCESSORS:
            return f"{marked[1]}{processors.block(results, readme.parent)}\n{marked[4]}"
        return f"{marked[1]}{block(found[marked[2]], readme.parent)}\n{marked[4]}"

    new = MARKED.sub(written, text)
    stale = [readme] if new != text else []
    for each in found.values():
        figure = each.path.with_suffix(".svg")
        if not figure.exists() or figures.signature_of(figure) != figures.signature(each):
            stale.append(figure)
    if not check:
        readme.write_text(new, encoding="utf-8")
        for each in found.values():
            figures.write(each)
    return stale


def _newest(name: str, results: Path) -> Record:
    found = record.newest(name, results)
    if found is None:
        raise ValueError(f"{results} has no record <date>-{name}.json, which README.md asks for")
    return found


def block(newest: Record, root: Path) -> str:
    """A table of whole steps, the figure, where they come from, and what is known about GPUs."""
    each = figures.steps(newest)
    rows, _ = table(each)
    picture = f"![{figures.headline(each)}]({_link(newest, root, '.svg')})"
    cpu, gpus = _wrapped(origin(newest, root)), _wrapped(gpu(newest, root))
    return "\n".join([*rows, "", picture, *cpu, "", *gpus])


def table(each: list[Steps]) -> tuple[list[str], str]:
    """Ours and the cheapest others; a sentence about the rest."""
    chosen = [one for one in each if one.name == OURS]
    chosen += [one for one in each if one.name != OURS][: ROWS - len(chosen)]
    threads = sorted({n for one in each for n in one.time})
    rows = []
    for one in each:
        if one in chosen:
            row = {"time and memory over plain torch's": _strong(one, one.name)}
            for n in threads:
                ratio = str(one.time.get(n, "-"))
                row["1 thread" if n == 1 else f"{n} threads"] = _strong(one, ratio)
            memory = [f"{one.memory[n]:.2f}" for n in sorted(one.memory)]
            row["peak memory"] = ", ".join(memory) or "-"
            rows.append(row | {"what it measures": one.lacks or "every sample, all parameters"})
    left = [one for one in each if one not in chosen]
    rest = [f"{o.name}{f' ({o.lacks})' if o.lacks else ''} {figures.first(o):.2f}" for o in left]
    some = "1 thread" if threads[0] == 1 else f"{threads[0]} threads"
    also = f"With {some} other ways to these norms take more: {'; '.join(rest)}. " if rest else ""
    return record.markdown(rows), also


def _strong(one: Steps, text: str) -> str:
    """Ours in bold, only the median of a ratio."""
    if one.name != OURS:
        return text
    first, _, rest = text.partition(" ")
    return f"**{first}** {rest}".rstrip()


def origin(newest: Record, root: Path) -> str:
    """Machine, torch, commit, command and record, which has the peers' versions."""
    about = newest.machine
    where = f"{about['processor']}, {about['cores']} cores, torch {about['torch']}"
    if "CPU kernel" in about:
        where += f", CPU kernel {about['CPU kernel']}"
    return (
        "Each ran in turn with plain PyTorch; these are medians and quartiles "
        f"({where}, commit {about['commit']}; `{newest.command}`, [record]({_link(newest, root)}))."
    )


def gpu(newest: Record, root: Path) -> str:
    """The newest records of a GPU, or what is known without one."""
    results = newest.path.parent
    dated = sorted(results.glob("????-??-??-gpu*.json"))
    if not dated:
        return f"**No GPU has run the kernels yet.** {compiled()}".rstrip()
    found = [record.read(p) for p in dated if p.name[:10] == dated[-1].name[:10]]
    links = ", ".join(f"[{each.name[11:]}]({_link(each, root)})" for each in found)
    return f"On a GPU ({found[-1].machine['gpu']}) we measured {links}."


def compiled() -> str:
    """What compilers made of the kernels, by the committed budgets."""
    budgets = [json.loads(path.read_text())["rows"] for path in sorted(BUDGETS.glob("*.json"))]
    kernels = [row for rows in budgets for row in rows.items() if "registers" in row[1]]
    if not kernels:
        return ""
    spilling = [name for name, row in kernels if row["spilled"]]
    kinds = [list(names) for _, names in groupby(sorted(spilling), lambda name: name.split()[0])]
    which = "; ".join(os.path.commonprefix(names).strip() for names in kinds)
    which = f" ({which})" if which else ""
    spills = f"{len(spilling) or 'none'} of them spill registers{which}"
    return f"Compilers have built {len(kernels)} variants of them, and {spills}."


def _link(each: Record, root: Path, suffix: str = ".md") -> str:
    return Path(os.path.relpath(each.path.with_suffix(suffix), root)).as_posix()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)

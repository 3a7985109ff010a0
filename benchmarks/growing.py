# SPDX-License-Identifier: Apache-2.0
"""Tables that grow case by case: a run that is killed keeps every case that it finished, and a case
that fails does not cost the others.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from benchmarks import gate
from benchmarks.record import Rows

Tables = dict[str, Rows]
Case = TypeVar("Case")

FAILED = "Failed"
"""The table of what raised."""


class Growing:
    """The tables so far."""

    def __init__(self) -> None:
        self.tables: Tables = {}

    def over(
        self, title: str, cases: Iterable[Case], rows_of: Callable[[Case], Rows]
    ) -> Iterator[Tables]:
        """Each case's rows under ``title``; all tables after each case."""
        for case in cases:
            try:
                table, rows = title, rows_of(case)
            except (Exception, SystemExit) as error:  # a failed gate exits
                table, rows = FAILED, [failure(f"{title}: {getattr(case, 'name', case)}", error)]
            self.tables.setdefault(table, []).extend(rows)
            yield self.tables


def failure(what: str, error: BaseException) -> dict[str, Any]:
    """A row that makes the run exit with 1; the traceback is printed."""
    traceback.print_exception(error)
    return {"check": what, "exit status": 1, "result": gate.raised(error)}

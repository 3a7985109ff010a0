# SPDX-License-Identifier: Apache-2.0
"""A report that is rewritten while its runs train."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from gnsfast.cli.records import NothingYet, Reader, named
from gnsfast.cli.report import write_report
from gnsfast.cli.runs import Run

HEARTBEAT = 60.0
"""Seconds after which a page is rewritten even without news, so that it does not go stale."""


def watch(
    paths: list[Path],
    out: Path,
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Run]:
    """Read ``paths`` every ``every`` seconds and rewrite ``out`` where there are new lines, until
    all runs have ended or the user presses Ctrl-C. The last page does not reload itself.

    Raises:
        RecordsError: for a broken line. The page keeps what was read before it.
        NothingYet: if the user stopped it before the first line was logged.
    """
    readers = [Reader(path) for path in paths]
    runs: list[Run] = []
    waiting: NothingYet | None = None
    written = -math.inf
    refresh = every
    try:
        while True:
            now = clock()
            news = any([reader.poll() for reader in readers])
            if news or not runs:
                try:
                    runs = named([reader.run() for reader in readers])
                except NothingYet as error:
                    if waiting is None:
                        say(f"{error}. Waiting for the first line.")
                    waiting = error
            if runs and all(run.state != "open" for run in runs):
                break
            if runs and (news or now - written >= HEARTBEAT):
                if news and written > 0:
                    refresh = min(HEARTBEAT, max(every, now - written))
                write_report(runs, out, {"refresh": refresh, "stale": 3 * HEARTBEAT + every})
                written = now
            sleep(every)
    except KeyboardInterrupt:
        if waiting is not None and not runs:
            raise waiting from None
    finally:
        if runs:
            write_report(runs, out)
    return runs

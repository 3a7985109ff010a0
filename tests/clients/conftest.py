# SPDX-License-Identifier: Apache-2.0
"""Prints the table of clients after ``make clients``, and with ``--record FOLDER`` writes it."""

from pathlib import Path

import pytest
from clients.recipes import ROWS

from benchmarks import record

COMMAND = "make clients"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="folder for the record of clients")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("clients")
        columns = list(dict.fromkeys(key for row in ROWS for key in row))
        rows = [{key: row.get(key) for key in columns} for row in ROWS]
        terminalreporter.write("\n".join(record.markdown(rows)) + "\n")
        folder = terminalreporter.config.getoption("--record")
        if folder is not None:
            record.write("clients", f"{COMMAND} RECORD={folder}", {"clients": rows}, folder)

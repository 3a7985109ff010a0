# SPDX-License-Identifier: Apache-2.0
"""Prints the table of clients after ``make clients``, and with ``--record FOLDER`` writes it."""

from pathlib import Path

import pytest
import torch
from clients.recipes import ROWS

from benchmarks import record

COMMAND = "make clients"

if torch.version.cuda is None:
    # The registry's torchvision is built for torch with CUDA. Beside a CPU build its operators do
    # not load, and its import, which timm and transformers try, asks for these.
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


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
            record.write("clients", COMMAND, {"clients": rows}, folder)

# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a run: JSON lines of a file, or of every ``*.jsonl`` in a folder."""

import json
import os
from pathlib import Path
from typing import Any


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All JSON objects, ordered by file name and line.

    Raises:
        ValueError: where there are none, or a line is not a JSON object (named by file and line).
        OSError: where ``path`` cannot be read.

    >>> import tempfile
    >>> from gnsfast.critical_batch.laws import read_records
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = open(f"{folder}/run.jsonl", "w").write('{"kind": "run"}\\n')
    ...     print(read_records(folder))
    [{'kind': 'run'}]
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = [record for file in files for record in _lines(file)]
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def _lines(file: Path) -> list[dict[str, Any]]:
    found = []
    *lines, last = file.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate([*lines, last], 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number > len(lines):
                break  # half a line: the run was killed, or is writing it now
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number}, is not a JSON object")
        found.append(record)
    return found

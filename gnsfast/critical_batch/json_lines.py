# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a run: JSON lines of a file, or of every ``*.jsonl`` in a folder."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """The objects of a file, one a line: each ``read`` yields those added since the last one.

    The last line may be half a line, because its run was killed or is writing it now: it is read
    once the rest is there. A file that became shorter is a new one, and is read from its start.

    Args:
        error: makes the exception for a line that is no JSON object, from the line's number and
            words.
    """

    def __init__(self, path: Path, error: Callable[[int, str], Exception]) -> None:
        self.path, self.error = path, error
        self.offset = self._lines = 0

    def shrank(self) -> bool:
        """Whether the file is a new one of the same name."""
        return self.path.stat().st_size < self.offset

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The number of each line and its object."""
        if self.shrank():
            self.offset = self._lines = 0
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            *whole, half = file.read().split(b"\n")
        for k, line in enumerate([*whole, half]):
            number, found = self._lines + 1, None
            try:
                found = json.loads(line) if line.strip() else None
            except ValueError:
                if k == len(whole):
                    return
                raise self.error(number, "this line is not JSON") from None
            if line.strip() and not isinstance(found, dict):
                raise self.error(number, "this line is not a JSON object")
            self.offset += len(line) + (k < len(whole))
            self._lines += k < len(whole)
            if found is not None:
                yield number, found


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

    def lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        refuse = lambda number, _: ValueError(f"{file}, line {number}, is not a JSON object")
        return JsonLines(file, refuse).read()

    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = [record for file in files for _, record in lines(file)]
    if not records:
        raise ValueError(f"{path} holds no records")
    return records

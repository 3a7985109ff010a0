# SPDX-License-Identifier: Apache-2.0
"""Modules of this folder in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def printed(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] = os.environ,
    under: Sequence[str] = (),
) -> str:
    """What ``python -m benchmarks.module`` prints; ``under`` precedes that command."""
    command = [*under, sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last}\n{done.stderr}")
    return done.stdout


def without_settings(**more: str) -> dict[str, str]:
    """The environment, in which nothing chooses among gnsfast's ways; with ``more`` variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith("GNSFAST_")} | more

# SPDX-License-Identifier: Apache-2.0
"""What is read in machine code: planted faults, each noticed."""

import pytest

pytest.importorskip("benchmarks")  # a wheel has none
pytest.importorskip("triton", reason="triton is there on Linux alone")

from benchmarks import compile_reading  # noqa: E402

pytestmark = pytest.mark.source

ARRIVAL = """
\tglobal_store_dword v[8:9], v3, off
\ts_waitcnt vmcnt(0)
\ts_barrier
\tbuffer_wbl2 sc1
\ts_waitcnt vmcnt(0)
\tglobal_atomic_add v7, v7, v8, s[30:31] sc0
"""


def test_stores_before_an_arrival() -> None:
    """A wait behind the barrier is that of one warp alone."""
    assert compile_reading.unordered(ARRIVAL) == 0
    without = ARRIVAL.replace("\ts_waitcnt vmcnt(0)\n\ts_barrier", "\ts_barrier")
    assert compile_reading.unordered(without) == 1
    assert compile_reading.unordered(ARRIVAL + without + without) == 2
    behind = ARRIVAL.replace("\ts_barrier", "\tbuffer_store_dword v3, off\n\ts_barrier")
    assert compile_reading.unordered(behind) == 1

# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel in every configuration, compiled for GPUs that need not be there, and read:
no spilled register, tensor cores where they belong, within the shared memory of the architecture,
and within the committed budget.
"""

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from proofs import proof  # noqa: E402

from benchmarks import budget, kernel_tables, no_gpu  # noqa: E402

pytestmark = [pytest.mark.source, proof]

TENSOR_CORES = {"80": ("HMMA",), "90": ("HGMMA", "HMMA"), "100": ("UTCHMMA", "HMMA")}

SPILLING = {(f"attention queries 256 {what}", "fp32") for what in ("all", "sinks", "all, masked")}
"""A float32 product of rows of 256 in the ordinary cores takes more registers than there are."""

SPILLING_OF = {"gfx942": {("attention keys 128 all, masked", "bf16")}}


SINGLE_STORES = 5
"""Of norms alone: tickets, a sample's square and that of the sum, each of these in two places on
Blackwell. A tile takes four more at least."""


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':56} {'dtype':5} warps registers spilled shared blocks instructions"]
    for row in rows:
        used = " ".join(f"{k} {row[k]}" for k in row if k.isupper() and row[k])
        lines.append(
            f"{row['kernel']:56} {row['dtype']:5} {row['warps']:5} {row['registers']:9} "
            f"{row['stack']:7} {row['shared']:6} {row.get('blocks', ''):6} "
            f"{row['instructions']:12}  {used}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("capability", kernel_tables.CAPABILITIES)
def test_compiled_kernels(capability: str) -> None:
    rows = kernel_tables.triton_rows(capability)
    print(f"\nsm_{capability}\n{table(rows)}")
    assert len(rows) > 40
    shared = no_gpu.DEVICES[capability].shared
    allowed = SPILLING | SPILLING_OF.get(capability, set())
    for row in rows:
        spills = row["stack"] or row["STL"] or row["LDL"]
        assert not spills or (row["kernel"], row["dtype"]) in allowed, f"{row['kernel']} spills"
        assert row["shared"] <= shared, f"{row['kernel']} takes too much shared memory"
        if row["tensor_cores"]:
            assert any(row[name] for name in TENSOR_CORES[capability]), f"{row['kernel']}: none"
        wgrad = row["kernel"].startswith("linear_wgrad")
        if wgrad and row["tensor_cores"] and capability == "90":
            assert row["HGMMA"] and not row["HMMA"], f"{row['kernel']} is not on the fast path"
            if row["dtype"] != "fp32" and "unaligned" not in row["kernel"]:
                assert row["in_flight"], f"{row['kernel']} waits for each product"
        assert not row["cut off"], f"{row['kernel']} multiplies float32 that is not rounded"
        assert not row["touched"], f"{row['kernel']} touches products in flight: {row['touched']}"
        assert not row["unfenced"], f"{row['kernel']} multiplies what it may not see yet"
        assert row["noticed"] or not row["HGMMA"], f"{row['kernel']}: no wait is missed"
        if wgrad and "norms" in row["kernel"] and "mixed" not in row["kernel"]:
            assert row["stores"] <= SINGLE_STORES, f"{row['kernel']} stores a tile"
        if "TMA" in row["kernel"]:
            assert row["UTMALDG"] and not row["LDGSTS"], f"{row['kernel']} reads by pointers"
    if why := budget.hold(f"triton-sm_{capability}", kernel_tables.triton_budget(rows)):
        pytest.skip(f"all else holds, but {why}")


@pytest.mark.parametrize("device", kernel_tables.AMD)
def test_compiled_kernels_of_amd(device: str) -> None:
    rows = kernel_tables.triton_rows(device)
    print(f"\n{device}\n{table(rows)}")
    assert len(rows) > 40
    allowed = SPILLING_OF.get(device, set())
    for row in rows:
        spills = row["stack"] and (row["kernel"], row["dtype"]) not in allowed
        assert not spills, f"{row['kernel']} spills"
        assert row["shared"] <= no_gpu.DEVICES[device].shared, f"{row['kernel']}: too much shared"
        assert not row["unordered"], f"{row['kernel']} arrives before its stores"
        assert row["MFMA"] or not row["tensor_cores"], f"{row['kernel']}: no matrix core"

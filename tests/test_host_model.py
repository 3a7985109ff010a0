# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's own source on a CPU model of the hardware, and bugs planted into it, each of
which the model must show.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
KERNEL = "linear_wgrad_sm90.cuh"
SEEDS = (1, 2, 3)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def build(folder: Path) -> Path:
    program = folder / "host_model_program"
    run = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    run += ["-o", str(program), str(folder / "host_model" / "main.cpp")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("seed", SEEDS)
def test_kernel(seed: int, tmp_path: Path) -> None:
    """T from 1 to 197, ragged I and O, clusters, splits, every output; norms to 1e-5."""
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    done = subprocess.run([build(tmp_path), str(seed)], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 13


BUGS = {
    "no wait at a sample's end": ("      wgmma_wait<0>();\n", ""),
    "stage released one block early": (
        "release(ring.previous_empty_barrier());\n        } else",
        "release(ring.empty_barrier());\n        } else",
    ),
    "no wait before a stage is released": ("          wgmma_wait<1>();", "          "),
    "consumer waits for the other phase": (
        "mbarrier_wait(ring.full_barrier(), ring.phase)",
        "mbarrier_wait(ring.full_barrier(), ring.phase ^ 1)",
    ),
    "producer waits for the other phase": (
        "mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1)",
        "mbarrier_wait(ring.empty_barrier(), ring.phase)",
    ),
    "too few arrivals free a stage": ("kCluster * kConsumerWarps);", "kConsumerWarps);"),
    "too many arrivals free a stage": (
        "kCluster * kConsumerWarps);",
        "kCluster * kConsumerWarps + 1);",
    ),
    "fewer bytes expected": ("expect(full, kStageBytes)", "expect(full, kStageBytes - 128)"),
    "leading offset": ("kLeading = kBoxBytes >> 4", "kLeading = 1024 >> 4"),
    "stride offset": ("kStride = 1024 >> 4", "kStride = 2048 >> 4"),
    "step along the tokens": ("right + k * kNextTokens", "right + k * kNextTokens / 2"),
    "accumulators kept over a sample's end": ("block + k > 0)", "b + block + k > 0)"),
    "multicast halves on one another": (" + rank * kShare * kColumns * 2;", ";"),
    "last block left out": ("(p.T + kBlockT - 1) / kBlockT;", "p.T < kBlockT ? 1 : p.T / kBlockT;"),
    "rows eight below": ("(k % 4 == 2 ? 8 : 0)", "(k % 4 == 2 ? 4 : 0)"),
    "turns not primed": ("if (group == 1) named_barrier", "if (group == 3) named_barrier"),
    "no barrier before leaving": ("  if constexpr (kCluster > 1) cluster_sync();  // a", "  // a"),
    "no fence after initialising barriers": ("    mbarrier_init_fence();\n", ""),
    "no fence before products": ("        wgmma_fence();\n", ""),
    "norm of the sample before lost": ("store_sqnorm(partial + b - 1, pending, lane);", ""),
    "norm in the next sample's place": ("partial + u.end - 1, pending", "partial + u.end, pending"),
    "total kept from tile to tile": ("    clear(total);\n", "    if (unit < 1) clear(total);\n"),
    "a part left out of the merge": ("part < p.parts; ++part", "part < p.parts - 1; ++part"),
    "parts of a split overlap": ("p.B) * u.part / parts);", "p.B) * u.part / parts) / 2;"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug: str, tmp_path: Path) -> None:
    """Found in every seed: a wrong number, a race, a deadlock, or what the model refuses."""
    right, wrong = BUGS[bug]
    source = (CSRC / KERNEL).read_text(encoding="utf-8")
    assert source.count(right) == 1, "the bug has no place in the kernel any more"
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    (tmp_path / KERNEL).write_text(source.replace(right, wrong), encoding="utf-8")
    program = build(tmp_path)
    for seed in SEEDS[:2]:
        done = subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=120)
        assert done.returncode != 0, f"seed {seed} shows nothing"

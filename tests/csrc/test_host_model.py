# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels' own source on a CPU model of the hardware, and bugs planted into it, each of
which the model must show.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from proofs import proof

CSRC = Path(__file__).parents[2] / "csrc"
SEEDS = (1, 2, 3)
CASES = {"sm90": 14, "sm80": 11, "token_sqnorms": 4}
SOURCES = {"sm90": "linear_wgrad_sm90.cuh", "sm80": "linear_wgrad_sm80.cuh"}
SOURCES["token_sqnorms"] = "token_sqnorms.cuh"

pytestmark = [
    pytest.mark.source,
    proof,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


def build(folder: Path, kernel: str, optimised: str) -> Path:
    program = folder / "host_model_program"
    run = ["g++", "-std=c++17", optimised, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    run += ["-o", str(program), str(folder / "host_model" / f"main_{kernel}.cpp")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("kernel", CASES)
def test_kernel(kernel: str, tmp_path: Path) -> None:
    """T from 1 to 197, ragged I and O, clusters, splits, every output; norms to 1e-5."""
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    program = build(tmp_path, kernel, "-O2")
    for seed in SEEDS:
        done = subprocess.run([program, str(seed)], capture_output=True, text=True)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(" ok\n") == CASES[kernel]


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
    "no barrier before leaving": ("    cluster_sync();  // a", "    // a"),
    "lanes leave one by one": ("    warp_sync();     // one", "    // one"),
    "lanes come to the first barrier one by one": ("  warp_sync();\n  if", "  if"),
    "no cluster barrier at the start": (
        "    cluster_sync();\n  } else {",
        "    block_sync();\n  } else {",
    ),
    "last turn not taken up": (
        "if (group == 0) named_barrier_sync",
        "if (group == 3) named_barrier_sync",
    ),
    "no fence after initialising barriers": ("    mbarrier_init_fence();\n", ""),
    "no fence before products": ("        wgmma_fence();\n", ""),
    "norm of the sample before lost": ("store_sqnorm(partial + b - 1, pending, lane);", ""),
    "norm in the next sample's place": ("partial + u.end - 1, pending", "partial + u.end, pending"),
    "total kept from tile to tile": ("if constexpr (V::kTotal) clear", "if (unit < 1) clear"),
    "a part left out of the merge": ("part < p.parts; ++part", "part < p.parts - 1; ++part"),
    "parts of a split overlap": ("u.begin = u.part * each +", "u.begin = u.part * each / 2 +"),
}


TURN = "        if constexpr (kOrdered) named_barrier_arrive(2 - group, kConsumers);\n"
PRODUCTS = "        register_fence(acc);\n        wgmma_fence();\n"
HANDED_OVER_EARLY = "turn handed over before the products"

SM80_BUGS = {
    "stage read before it is there": ("copy_wait<kStages - 2>", "copy_wait<kStages - 1>"),
    "no barrier before a stage is filled": ("      block_sync();  // everyb", "      // everyb"),
    "no group for an empty step": (
        "      copy_commit();",
        "      if (step < steps) copy_commit();",
    ),
    "tokens beyond the sample": ("token + t < T &&", "token + t <= T &&"),
    "features beyond the tensor": ("feature < from.features", "feature < from.features + 8"),
    "second half of the tokens": ("lane % 8 + lane / 16 * 8", "lane % 8"),
    "columns eight further": ("/ 8 + lane / 16;", "/ 8;"),
    "accumulators kept over a sample's end": ("        clear(flat);\n", ""),
    "rows eight below": ("(k % 4 == 2 ? 8 : 0)", "(k % 4 == 2 ? 4 : 0)"),
    "no barrier between units": ("    block_sync();  // before the next", "    // before the next"),
    "norm in the next sample's place": (
        "store_sqnorm(partial + b,",
        "store_sqnorm(partial + b + 1,",
    ),
    "a part left out of the merge": ("part < p.parts; ++part", "part < p.parts - 1; ++part"),
    "total kept from tile to tile": ("    clear(total);\n", "    if (unit < 1) clear(total);\n"),
}
TOKEN_BUGS = {
    "elements of a row left out": ("k += 32 * kRowElements", "k += 64 * kRowElements"),
    "rows of a slice": ("b * rows.stride", "b * rows.features"),
    "the last block's samples": ("* kRowWarps + uniform", "* 4 + uniform"),
    "bias norm twice": ("of_x * of_dy;", "of_x * of_dy * of_dy;"),
    "lanes left out of a sum": ("mask = 16; mask;", "mask = 8; mask;"),
}
PLANTED = {"sm90": BUGS, "sm80": SM80_BUGS, "token_sqnorms": TOKEN_BUGS}
ALL_BUGS = [("sm90", HANDED_OVER_EARLY)]
ALL_BUGS += [(kernel, bug) for kernel, bugs in PLANTED.items() for bug in bugs]


@pytest.mark.parametrize(("kernel", "bug"), ALL_BUGS)
def test_planted_bug(kernel: str, bug: str, tmp_path: Path) -> None:
    """Found in every seed: a wrong number, a race, a deadlock, or what the model refuses."""
    if bug == HANDED_OVER_EARLY:
        changes = [(TURN, ""), (PRODUCTS, TURN + PRODUCTS)]
    else:
        changes = [PLANTED[kernel][bug]]
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    names = (SOURCES[kernel], "work.cuh")
    for right, wrong in changes:
        texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in names}
        found = {name: text.count(right) for name, text in texts.items()}
        assert sum(found.values()) == 1, "the bug has no place in the kernel any more"
        name = max(found, key=found.__getitem__)
        (tmp_path / name).write_text(texts[name].replace(right, wrong), encoding="utf-8")
    program = build(tmp_path, kernel, "-O1")  # 1.9 s for sm90, 2.7 s by -O2
    for seed in SEEDS[: 2 if kernel == "sm90" else 1]:
        done = subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=300)
        assert done.returncode != 0, f"seed {seed} shows nothing"

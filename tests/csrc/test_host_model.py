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
CASES = {"sm90": 15, "sm80": 13, "finish": 9, "token_sqnorms": 4}
SOURCES = {"sm90": "linear_wgrad_sm90.cuh", "sm80": "linear_wgrad_sm80.cuh"}
SOURCES |= {"finish": "finish.cuh", "token_sqnorms": "token_sqnorms.cuh"}

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
    """T from 1 to 601, ragged I and O, clusters, cut tiles, every output; norms to 1e-5."""
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
    "norm of the sample before lost": ("store_sqnorm(norms + b - 1, pending, lane);", ""),
    "norm in the next sample's place": (
        "norms + piece.end - 1, pending",
        "norms + piece.end, pending",
    ),
    "total kept from piece to piece": ("if constexpr (V::kTotal) clear", "if (step < 1) clear"),
    "norm of a cut tile's sum left open": (
        "if (piece.begin == 0 && lane == 0) norms",
        "if (lane > 31) norms",
    ),
    "rank left out of a part's place": ("piece.slot, rank);", "piece.slot, 0);"),
    "tickets not cleared": ("  clear_tickets(p, kThreads);\n", ""),
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
    "no barrier between pieces": (
        "    block_sync();  // before the next",
        "    // before the next",
    ),
    "norm in the next sample's place": ("store_sqnorm(norms + b,", "store_sqnorm(norms + b + 1,"),
    "total kept from piece to piece": ("    clear(total);\n", "    if (round < 1) clear(total);\n"),
    "norm of a cut tile's sum left open": (
        "if (piece.begin == 0 && lane == 0) norms",
        "if (lane > 31) norms",
    ),
    "tickets not cleared": ("  clear_tickets(p, kThreads);\n", ""),
    "last ticket not cleared": ("k < p.tasks.columns + 1;", "k < p.tasks.columns;"),
    "first pair of a run lost": ("first = run * plan.run;", "first = run * plan.run + (run > 0);"),
    "last pair of a run in the next run too": (
        "first + plan.run < pairs ? first + plan.run :",
        "first + plan.run + 1 < pairs ? first + plan.run + 1 :",
    ),
    "second tile of a run lost": ("first / p.B + second;", "first / p.B + 0 * second;"),
    "second tile from its second sample": ("begin < 0 ? 0 : begin,", "begin < 0 ? 1 : begin,"),
    "tiles of a run share a slot": (": p.B, run + cut};", ": p.B, run};"),
    "last run left out": (
        "plan.runs = cut ? times(pairs, plan.run)",
        "plan.runs = cut ? pairs / plan.run",
    ),
    "cut tiles counted from the first": ("return {plan.whole_tiles + cut,", "return {cut,"),
}
FINISH_BUGS = {
    "last part lost": ("run <= last; ++run", "run < last; ++run"),
    "first part lost": ("= pair / plan.run", "= (pair + plan.run - 1) / plan.run"),
    "a part of the next tile": ("(pair + p.B - 1) / plan.run", "(pair + p.B) / plan.run"),
    "a part added twice": ("plan.tile, run + cut,", "plan.tile, (run < last ? run : first) + cut,"),
    "rank left out of a part's place": ("plan.tile, run + cut, rank)", "plan.tile, run + cut, 0)"),
    "cut tiles counted from the first": ("plan.whole_tiles + cut, rank);", "cut, rank);"),
    "tile's edge": ("row < p.O && column < p.I", "row < p.O"),
    "last ticket one short": ("tasks.norms + tasks.columns;", "tasks.norms + tasks.columns - 1;"),
    "ticket one short": ("== blocks - 1;", "== blocks - 2;"),
    "ticket one over": ("== blocks - 1;", "== blocks;"),
    "first block goes on, not the last": ("== blocks - 1;", "== 0 * blocks;"),
    "one ticket for all columns": ("p.work.tickets + columns, of", "p.work.tickets, of"),
    "no fence before the arrival": ("    fence();\n    *flag", "    *flag"),
    "no fence after the arrival": ("blocks - 1;\n    fence();", "blocks - 1;"),
    "no barrier before the arrival": ("  block_sync();  // the stores", "  // the stores"),
    "no barrier after the arrival": ("  block_sync();\n  return *flag;", "  return *flag;"),
    "no barrier before a sum": ("  block_sync();  // the sum", "  // the sum"),
    "no barrier within a sum": ("  block_sync();\n  double total", "  double total"),
    "no barrier after tokens": ("  block_sync();\n  float total", "  float total"),
    "chunk of tokens lost": ("times(T, kBiasTokens)", "T / kBiasTokens + (T < kBiasTokens)"),
    "tokens beyond the sample": ("< kBiasTokens ? p.T :", "< 1 ? p.T :"),
    "rows of norms lost": ("norm_rows = times(tasks.rows, kNormRows)", "norm_rows = 1"),
    "rows of norms beyond the last": ("< p.tasks.rows ? begin", "< 0 ? begin"),
    "samples beyond 32 lost": ("times(B + 1, 32)", "times(32, 32)"),
    "sample's sum goes on in the next": ("        sum = 0;\n", ""),
    "bias norm in the next sample's place": ("store_norm(b++, sum)", "store_norm(++b, sum)"),
    "norm of cut tiles left out": ("if (column == p.B) sum += of_parts;", ""),
    "norm of a share lost": ("k < p.tasks.parts; k", "k < p.tasks.parts - 1; k"),
    "second row beside the first": ("f.rows[f.row_stride + column]", "f.rows[p.B + 2 + column]"),
    "no count of calls": ("    f.rows[p.B + 1] = 1.f;\n", ""),
    "an order of its own": (
        "total += shared[k * 32 + lane];",
        "total = float(total + shared[(k + block_index()) % kFinishWarps * 32 + lane]);",
    ),
    "half of a sum left out": ("half = kFinishThreads / 2", "half = kFinishThreads / 4"),
}
TOKEN_BUGS = {
    "elements of a row left out": ("k += 32 * kRowElements", "k += 64 * kRowElements"),
    "rows of a slice": ("b * rows.stride", "b * rows.features"),
    "the last block's samples": ("* kRowWarps + uniform", "* 4 + uniform"),
    "bias norm twice": ("of_x * of_dy;", "of_x * of_dy * of_dy;"),
    "lanes left out of a sum": ("mask = 16; mask;", "mask = 8; mask;"),
}
PLANTED = {"sm90": BUGS, "sm80": SM80_BUGS, "finish": FINISH_BUGS, "token_sqnorms": TOKEN_BUGS}
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
    names = (SOURCES[kernel], "work.cuh", "plan.h")
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

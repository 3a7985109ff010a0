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
CASES = {"sm90": 17, "sm80": 15, "finish": 15, "token_sqnorms": 4, "plan": 1}
SOURCES = {"sm90": "linear_wgrad_sm90.cuh", "sm80": "linear_wgrad_sm80.cuh"}
SOURCES |= {"finish": "finish.cuh", "token_sqnorms": "token_sqnorms.cuh", "plan": "plan.h"}

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


BESIDE_ALONE = "if constexpr (kStored<Output>) store_sqnorm(norms + p.B,"

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
    "total kept from piece to piece": (
        "if constexpr (V::kTotal) clear",
        "if (walk.which < 2) clear",
    ),
    "norm of a cut tile's sum left open": (
        "if (piece.begin == 0 && lane == 0) norms",
        "if (lane > 31) norms",
    ),
    "rank left out of a part's place": ("piece.slot, rank);", "piece.slot, 0);"),
    "tickets not cleared": ("  clear_tickets(p, kThreads);\n", ""),
    "norm of the sum beside dW alone": ("store_sqnorm(norms + p.B,", BESIDE_ALONE),
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
    "total kept from piece to piece": (
        "    clear(total);\n",
        "    if (walk.which < 2) clear(total);\n",
    ),
    "norm of a cut tile's sum left open": (
        "if (piece.begin == 0 && lane == 0) norms",
        "if (lane > 31) norms",
    ),
    "tickets not cleared": ("  clear_tickets(p, kThreads);\n", ""),
    "norm of the sum beside dW alone": ("store_sqnorm(norms + p.B,", BESIDE_ALONE),
    "last ticket not cleared": ("k < p.tasks.tickets;", "k < p.tasks.tickets - 1;"),
}
PLAN_BUGS = {
    "an owner takes all samples": ("cut < 0 ? p.B : plan.own", "cut < 1 ? p.B : plan.own"),
    "every other unit left out": ("unit += clusters, which", "unit += 2 * clusters, which"),
    "an owner has two pieces": ("which ? 0 : cut < 0", "which > 1 ? 0 : cut < 0"),
    "owners share a slot": ("cut < 0 ? -1 : cut}", "cut < 0 ? -1 : 0}"),
    "an owner's tile as if whole": ("cut < 0 ? -1 : cut}", "cut < 1 ? -1 : cut}"),
    "first sample of a helper lost": (
        "first = helper * plan.own;",
        "first = helper * plan.own + 1;",
    ),
    "last sample of a helper in the next too": (
        "first + plan.own < all ? first + plan.own :",
        "first + plan.own + 1 < all ? first + plan.own + 1 :",
    ),
    "third tile of a helper lost": (
        "if (piece.begin < piece.end) return",
        "if (piece.begin < piece.end && which < 3) return",
    ),
    "second tile from its second sample": ("begin < 0 ? 0 : begin", "begin < 0 ? 1 : begin"),
    "a helper ends where its last tile begins": (
        "end < rest ? end : rest",
        "end < rest ? 0 : rest",
    ),
    "helpers from the owner's first sample": ("plan.own + (begin < 0", "(begin < 0"),
    "tiles of a helper share a slot": (
        "whole_tiles + helper + cut;",
        "whole_tiles + helper + 0 * cut;",
    ),
    "helpers' parts in the owners' slots": (
        "whole_tiles + helper + cut;",
        "whole_tiles + helper + cut - 1;",
    ),
    "cut tiles counted from the first": ("return {plan.whole_tiles + cut,", "return {cut,"),
    "a slot too few": ("(2 * cut_tiles() + helpers - 1)", "(2 * cut_tiles() + helpers - 2)"),
    "last helper left out": (
        "times(static_cast<int64_t>(left) * rest, own)",
        "left * rest / own",
    ),
    "owners' share rounded down": (
        "own = times(pairs, plan.at_once)",
        "own = pairs / plan.at_once",
    ),
    "first helper's part lost": ("{cut * rest / p", "{(cut * rest + rest - 1) / p"),
    "last helper's part lost": ("last / p.plan.own + 1}", "last / p.plan.own}"),
    "a part of the next tile": ("rest + rest - 1;", "rest + rest;"),
    "busiest without the whole tiles": ("return times(whole_tiles, at_once) * B", "return 0 * B"),
    "chunks that leave a token out": ("times(T, tasks.chunks)", "T / tasks.chunks"),
    "more chunks than one block adds": ("kBiasTokens), kPieces / B)", "kBiasTokens), kPieces)"),
    "more blocks than one adds": (
        "times(B, tasks.together * kPieces)",
        "times(B, 2 * tasks.together * kPieces)",
    ),
    "fewer samples than blocks have": ("samples = tasks.together *", "samples = 1 *"),
}
FINISH_BUGS = {
    "norm of cut tiles beside dW alone": (
        "if (thread_index() == 0) store_for_others(p.work.part_norms",
        "if (kStored<Output> && thread_index() == 0) store_for_others(p.work.part_norms",
    ),
    "last part lost": ("helper < helpers.end;", "helper < helpers.end - 1;"),
    "owner's part lost": ("helper = helpers.begin - 1;", "helper = helpers.begin;"),
    "a part added twice": ("slot_of(plan, cut, helper);", "slot_of(plan, cut, helpers.begin);"),
    "rank left out of a part's place": ("plan.tile, slot, rank)", "plan.tile, slot, 0)"),
    "cut tiles counted from the first": ("plan.whole_tiles + cut, rank);", "cut, rank);"),
    "tile's edge": ("row < p.O && column < p.I", "row < p.O"),
    "last ticket one short": ("tasks.widths + tasks.columns;", "tasks.widths + tasks.columns - 1;"),
    "ticket one short": ("== blocks - 1;", "== blocks - 2;"),
    "ticket one over": ("== blocks - 1;", "== blocks;"),
    "first block goes on, not the last": ("== blocks - 1;", "== 0 * blocks;"),
    "one ticket for all columns": ("tickets + columns, tasks", "tickets, tasks"),
    "one ticket for all widths": ("tickets + width, tasks", "tickets, tasks"),
    "one ticket for all pieces": ("tasks.columns + piece, tasks", "tasks.columns, tasks"),
    "widths and columns share tickets": ("    tickets += tasks.widths;\n", ""),
    "pieces and columns share tickets": ("tickets + tasks.columns + piece", "tickets + piece"),
    "no fence before the arrival": ("    fence();\n    *flag", "    *flag"),
    "no fence after the arrival": ("blocks - 1;\n    fence();", "blocks - 1;"),
    "no barrier before the arrival": ("  block_sync();  // the stores", "  // the stores"),
    "no barrier after the arrival": ("  block_sync();\n  return *flag;", "  return *flag;"),
    "no barrier before a sum": ("  block_sync();  // the sum b", "  // the sum b"),
    "no barrier within a sum": ("  block_sync();\n  double total", "  double total"),
    "no barrier before tokens": ("    block_sync();  // the sums", "    // the sums"),
    "no barrier after tokens": ("    block_sync();\n    float of", "    float of"),
    "tokens beyond the sample": ("< tasks.tokens ? p.T :", "< 1 ? p.T :"),
    "warps of a sample all begin at its first token": ("t = begin + (warp &", "t = begin + (0 &"),
    "every token for each warp": ("t += tasks.warps, dy", "t += 1, dy"),
    "a token's row for the next": ("dy += tasks.warps * f.stride_t", "dy += f.stride_t"),
    "one sample a round": ("warp * tasks.together / kFinishWarps;", "0 * warp;"),
    "a sample beyond the last": ("column < p.O && mine < last", "column < p.O && mine <= last"),
    "samples of a round run into one": ("      of_sample = 0.f;\n", ""),
    "norm of a sample in the next's place": (
        "(p.B + 1) + at, sqnorm)",
        "(p.B + 1) + at + 1, sqnorm)",
    ),
    "rows of norms lost": ("heights = times(tasks.rows, kNormRows)", "heights = 1"),
    "rows of norms beyond the last": ("< p.tasks.rows ? begin", "< 0 ? begin"),
    "samples beyond 32 lost": ("times(B + 1, 32)", "times(32, 32)"),
    "numbers of 32 samples in those of the next": (
        "begin = width * 32, end",
        "begin = width * 32 + 32, end",
    ),
    "first number of a piece lost": (
        "begin = piece * tasks.samples, rows",
        "begin = piece * tasks.samples + 1, rows",
    ),
    "sample's sum goes on in the next": ("        sum = 0;\n", ""),
    "bias norm in the next sample's place": ("leave_norm(b++, sum)", "leave_norm(++b, sum)"),
    "no barrier between norms and their sum": (
        "  block_sync();\n  if (thread <= b)",
        "  if (thread <= b)",
    ),
    "norm of the sum in a sample's place": ("row + p.B - b + thread", "row + thread"),
    "norms of a warp lost": ("warp = 0; warp < kFinishWarps;", "warp = 1; warp < kFinishWarps;"),
    "norms of chunked samples not written": ("tasks.chunks > 1) write", "tasks.chunks > 2) write"),
    "norm of cut tiles left out": ("of_tiles + of_parts", "of_tiles + 0 * of_parts"),
    "norm of a share lost": ("part_norms, tasks.parts, 1", "part_norms, tasks.parts - 1, 1"),
    "a sample's norm for that of the sum": (
        "p.work.norm_sums + p.B,",
        "p.work.norm_sums + p.B - 1,",
    ),
    "values beyond the first 256 lost": (
        "k < count; k +=",
        "k < count && k < kFinishThreads; k +=",
    ),
    "second row beside the first": ("row = f.rows + f.row_stride;", "row = f.rows + p.B + 2;"),
    "samples of the bias in the first row": ("write_row(f.rows + f.row_stride", "write_row(f.rows"),
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
PLANTED |= {"plan": PLAN_BUGS}
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

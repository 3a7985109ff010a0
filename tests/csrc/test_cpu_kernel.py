# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels under sanitizers and on threads, and bugs planted into them:
``csrc/cpu/check.cpp`` compares random problems with loops in float64. The kernels for AMX run on a
model of its instructions.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from proofs import proof

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"
FLAGS = "-std=c++17 -ffp-contract=fast -fno-math-errno -pthread -Wall -Wextra -Werror".split()
FLAGS += ["-Wno-psabi", "-Wno-unknown-pragmas", "-DGNSFAST_BFLOAT16", "-DGNSFAST_AMX_MODEL"]

UNITS = (
    "linear_wgrad.cpp",
    "gram.cpp",
    "norm_backward.cpp",
    "embedding_wgrad.cpp",
    "transpose.cpp",
)
UNITS += ("bfloat16_wgrad.cpp", "bfloat16_gram.cpp", "amx_wgrad.cpp", "amx_gram.cpp", "check.cpp")

pytestmark = [
    pytest.mark.source,
    proof,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where units are kept compiled: a planted bug changes few of them."""
    return tmp_path_factory.mktemp("objects")


def included(path: Path) -> set[Path]:
    """A file with all files of its folder that it includes, directly or by others."""
    names = re.findall(r'^#(?:include|define GNSFAST_LOOPS) "(.+)"', path.read_text(), re.M)
    return {path}.union(*(included(path.parent / name) for name in names))


def built(folder: Path, objects: Path, *flags: str) -> Path:
    program, compiled = folder / "check", []
    for unit in UNITS:
        files = sorted(included(folder / unit))
        contents = [*flags, *(f"{path.name} {path.read_text()}" for path in files)]
        digest = hashlib.sha256("\n".join(contents).encode()).hexdigest()
        compiled.append(objects / f"{unit}-{digest}.o")
        if not compiled[-1].exists():
            run = ["g++", *FLAGS, *flags, "-c", str(folder / unit), "-o", str(compiled[-1])]
            done = subprocess.run(run, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    run = ["g++", *FLAGS, *flags, "-o", str(program), *map(str, compiled)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def checked(program: Path, seed: int = 1) -> "subprocess.CompletedProcess[str]":
    poisoned = os.environ | {"MALLOC_PERTURB_": "90"}  # fresh memory holds no zeros
    return subprocess.run([program, str(seed)], capture_output=True, text=True, env=poisoned)


@pytest.mark.parametrize(
    "flags",
    [
        ("-O2",),
        ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        ("-O1", "-g", "-fsanitize=thread"),
    ],
    ids=["optimised", "address and undefined", "threads"],
)
def test_kernel(flags: tuple[str, ...], tmp_path: Path, objects: Path) -> None:
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    done = checked(built(tmp_path, objects, *flags))
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


BUGS = {
    "a sample's registers are not cleared": (
        "if (chunk.resume) {  // after",
        "if (!chunk.first) {  // after",
    ),
    "a long sample's chunk is not carried over": (
        "if (chunk.resume) {  // after",
        "if (false) {  // after",
    ),
    "the first sample is added to what was there": ("if (!chunk.first) {", "if (true) {"),
    "each sample replaces the one before": ("if (!chunk.first) {", "if (false) {"),
    "the sum is squared before it is whole": (
        "if (chunk.final) add_squares(squares.total);",
        "if (chunk.first) add_squares(squares.total);",
    ),
    "the squares of every other row are lost": ("sums[0][v] += sums[kSums - 1][v];", ""),
    "a packed tail is not filled with zeros": (
        "k < columns ? value(from[k * side.stride_n]) : 0.f",
        "value(from[k * side.stride_n])",
    ),
    "an edge is written as a whole tile": (
        "const bool whole = columns == kColumns && call.column_step == 1;",
        "const bool whole = call.column_step == 1;",
    ),
    "a transposed tile is written as it lies": (
        "const bool whole = columns == kColumns && call.column_step == 1;",
        "const bool whole = columns == kColumns;",
    ),
    "the bias stays behind when the sides change": (
        "call.bias_of_right = !call.bias_of_right;",
        "",
    ),
    "a panel that is not packed is read as if it were": (
        "tile.right_step = right.stride_t;",
        "",
    ),
    "a left panel that is not packed is read as if it were": (
        "tile.left_step = left.stride_t;",
        "",
    ),
    "the last tile begins where a whole one before it would end": (
        "next = down + rows;",
        "next = down + kRows;",
    ),
    "every panel of a group is read as its first": (
        "at.right_panels + in_group * packed_rows",
        "at.right_panels + 0 * in_group * packed_rows",
    ),
    "a few tokens are packed over those before": (
        "to + k * rows + t / Packed::kTokens * kWidth;",
        "to + k * rows;",
    ),
    "tokens beyond the first few are not those that are packed": (
        "from += step * side.stride_t",
        "from += 0 * step * side.stride_t",
    ),
    "a narrow panel is packed as a whole one": (
        "to + k * rows + t / Packed::kTokens * narrow;",
        "to + k * rows + t / Packed::kTokens * kWidth;",
    ),
    "the middle of a panel is not copied": (
        "for (int k : {0, kWidth % kFew})",
        "for (int k : {0, 0})",
    ),
    "a tile's other register is not squared": (
        "both += squares[v];",
        "both += 0 * squares[v];",
    ),
    "columns are taken to be side by side": (
        "side.stride_n == 1 && columns == kWidth;",
        "columns == kWidth;",
    ),
    "pairs: columns are taken to be side by side": (
        "side.stride_n == 1 && columns == kWidth &&",
        "columns == kWidth &&",
    ),
    "bfloat16 is shifted by 15": ("(x.bits) << 16", "(x.bits) << 15"),
    "a long sample's bias is not carried over": (
        "if (chunk.resume) std::memcpy(sum,",
        "if (false) std::memcpy(sum,",
    ),
    "squares of a chunk stay for the next": (
        "std::exchange(square, 0.0)",
        "square",
    ),
    "the bias is added in every column of blocks": (
        "(left ? block.left : block.top) > 0 ||",
        "false ||",
    ),
    "tokens beyond 32 are lost": (
        "done < tokens; done += kFewTokens",
        "done < 1; done += kFewTokens",
    ),
    "the next token is added where a copy has none": (
        "add_tokens(copy, kColumns, chunk, sums, k);",
        "add_tokens(copy, kColumns - 1, chunk, sums, k);",
    ),
    "the bias's last columns are read where they lie": (
        "side.stride_n == 1 && columns == kColumns) {",
        "side.stride_n == 1) {",
    ),
    "samples of one token are adjacent": (
        "call.left.stride_t = call.left.stride_b;",
        "",
    ),
    "segments begin at the first row": (
        "call.starts ? call.starts[b] * left.stride_t",
        "call.starts ? b * left.stride_t",
    ),
    "the last panel belongs to no block": (
        "grid.rows * at / grid.in_rows",
        "(grid.rows - 1) * at / grid.in_rows",
    ),
    "two threads share their memory": (
        "shared.memory + thread * shared.each",
        "shared.memory + 0 * thread * shared.each",
    ),
    "norms that are given are not taken": (
        "if (b < call.B && call.sqnorms)",
        "if (b < 0 && call.sqnorms)",
    ),
    "pairs: the second token of a pair is lost": ("words(other) << 16", "0 * words(other)"),
    "pairs: the last token is taken with the next sample's": (
        "two ? at[side.stride_t].bits : 0",
        "at[side.stride_t].bits",
    ),
    "pairs: the middle of a panel is not copied": (
        "constexpr int kLast = std::max(0, kWidth - kFew);",
        "constexpr int kLast = 0;",
    ),
    "AMX: a long sample's chunk is not carried over": (
        "chunk.resume && k < kSquare",
        "false && k < kSquare",
    ),
    "AMX: each sample replaces the one before": (
        "chunk.first ? v : v + load(dw + k * kLanes)",
        "v",
    ),
    "AMX: the second half of a tile's columns is the first": (
        "_mm512_add_epi32(low, _mm512_set1_epi32(8))",
        "low",
    ),
    "AMX: a tile is written beyond dW's columns": ("~0u >> (kTile - columns)", "~0u"),
    "AMX: a transposed tile is written as it lies": (
        "if (call.column_step != 1) {",
        "if (false) {",
    ),
    "AMX: rows change places when they are transposed": (
        "_mm512_unpacklo_epi64(b[i], b[4 + i])",
        "_mm512_unpacklo_epi64(b[4 + i], b[i])",
    ),
    "AMX: the lower half of a tile is the upper one": (
        "amx::load<5>(left + kSquare / 2, kBytes);",
        "amx::load<5>(left, kBytes);",
    ),
    "AMX: tokens of the next sample are packed": (
        "count(tokens, step * kTile, kTile),",
        "kTile,",
    ),
    "AMX: every panel of a group is read as its first": (
        "at.right + in_group * steps * kTile",
        "at.right + 0 * in_group * steps * kTile",
    ),
    "AMX: columns are taken to be side by side": (
        "side.stride_n == 1 && columns == kTile",
        "columns == kTile",
    ),
    "AMX: registers are used before they are configured": ("  const amx::Tiles tiles;\n\n", ""),
    "rows' products: those beside the diagonal count once": ("(t < s ? 2 : 1) *", "1 *"),
    "rows' products: the last numbers of a row are lost": (
        "std::copy(a[i] + k, a[i] + stop, copy[i]);",
        "std::copy(a[i] + k, a[i] + k, copy[i]);",
    ),
    "rows' products: rows beyond the last token count": (
        "i < kSide && s + i < T; ++i",
        "i < kSide; ++i",
    ),
    "rows' products: the absolute sum cancels": (
        "sum += term;\n          absolute += std::abs(term);",
        "sum += term;\n          absolute += term;",
    ),
    "rows' products: bfloat16 is not shifted": ("(words << 16)", "(words << 15)"),
    "rows' products: half of the pairs are taken twice": (
        "static constexpr int kStep = 2 * kLanes;",
        "static constexpr int kStep = kLanes;",
    ),
    "AMX, rows' products: those beside the diagonal count once": (
        "const double times = t < s ? 2 : 1;",
        "const double times = 1;",
    ),
    "AMX, rows' products: samples are taken to be adjacent": (
        "first + count <= T || side.stride_b == T * side.stride_t",
        "true",
    ),
    "AMX, rows' products: a row is read beyond its end": (
        "side.stride_n == 1 && side.N % kTile == 0",
        "side.stride_n == 1",
    ),
    "AMX, rows' products: one of four sums is lost": (
        "load(to + 3 * kRegister + k)",
        "0 * load(to + 3 * kRegister + k)",
    ),
    "AMX, rows' products: a sample takes its neighbours' rows": (
        "for (int64_t t = k * T; t < (k + 1) * T; ++t)",
        "for (int64_t t = 0; t < (k + 1) * T; ++t)",
    ),
    "AMX, rows' products: terms may cancel in the absolute sum": (
        "term < 0 ? -term : term",
        "term",
    ),
    "AMX, rows' products: the last group has all samples": (
        "std::min(in_group(T), call.B - b)",
        "in_group(T)",
    ),
    "a norm's tail is filled with ones": (
        "std::fill(memory + F, memory + padded(F), 0.f);",
        "std::fill(memory + F, memory + padded(F), 1.f);",
    ),
    "a norm's sums of few tokens stay for the next": (
        "      std::fill(few, gain, 0.f);\n    }",
        "    }",
    ),
    "a norm's tokens beyond the last 32 are lost": (
        "if ((next - part.token) % kFewTokens && next < part.last_token) continue;",
        "if ((next - part.token) % kFewTokens) continue;",
    ),
    "a sample of a norm has one part only": (
        "if ((index + 1) % work.parts) continue;",
        "",
    ),
    "a layer norm does not subtract the mean of dx": (
        "rows[r].constant = sums[kR + r] * share;",
        "rows[r].constant = 0;",
    ),
    "only the last numbers of a wide row are added": (
        "total[s] += sum_of(few[s]);",
        "total[s] = sum_of(few[s]);",
    ),
    "a norm's last rows take the means of others": (
        "find_means<1, kCentered>(rows + r, gain",
        "find_means<1, kCentered>(rows, gain",
    ),
    "a norm's sample begins with the one before": (
        "(begun ? own[k] : 0.0)",
        "own[k] * (begun ? 1 : 0.5)",
    ),
    "the gain's offset is lost": ("call.w[k] + call.offset", "call.w[k]"),
    "bfloat16 is cut off, not rounded": (
        "uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)",
        "uint16_t>(bits >> 16)",
    ),
    "the row of a norm's bias is its weight's": (
        "if (call.db) finish(work, 1, call.db, row);",
        "if (call.db) finish(work, 0, call.db, row);",
    ),
    "padding has a gradient": ("if (id < 0 || id != call.padding_idx) *end++", "*end++"),
    "each token of an id is squared by itself": (
        "[&](const Place& place) { return place.id != at->id; });",
        "[&](const Place& place) { return &place != at; });",
    ),
    "an id's tokens beyond 32 are lost": (
        "if (run.end - run.begin > kFewTokens) {",
        "if (false) {",
    ),
    "dW is squared before its last sample": (
        "run.last = !seen[id];",
        "run.last = b == 0;",
    ),
    "the squares of an embedding's sample stay for the next": (
        "found += std::exchange(squares[k], 0.0);",
        "found += squares[k];",
    ),
    "the last columns of an embedding belong to no thread": (
        "return int(blocks * at / parts);",
        "return int((blocks - (blocks > 1)) * at / parts);",
    ),
    "a transposed edge is written as a whole tile": ("std::min<int64_t>(kTile, a.C - c)", "kTile"),
    "each part of a long line is its first": (
        "item % across * kAcross",
        "0 * (item % across) * kAcross",
    ),
}


ROUNDS = {"two threads share their memory": 50}
"""Of random problems: on a busy machine threads may run one after the other in all of a round."""


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug: str, tmp_path: Path, objects: Path) -> None:
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    right, wrong = BUGS[bug]
    holding = [path for path in tmp_path.glob("*.*") if right in path.read_text()]
    assert len(holding) == 1, f"{right} is in {holding}"
    text = holding[0].read_text()
    assert text.count(right) == 1
    holding[0].write_text(text.replace(right, wrong))
    program = built(tmp_path, objects, "-O1")
    rounds = range(1, 1 + ROUNDS.get(bug, 1))
    assert any(checked(program, seed).returncode for seed in rounds), f"not noticed: {bug}"

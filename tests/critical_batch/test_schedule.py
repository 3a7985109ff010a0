# SPDX-License-Identifier: Apache-2.0
"""Batch-size schedules: steps counted one by one, logs, and other frameworks' own reading."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gnsfast.cli.app import app
from gnsfast.counts import exact_count, parse_count, short_count
from gnsfast.critical_batch.laws import BatchSizeSchedule, exports

OLMO = [(0, 1024), (168e9, 2048), (503e9, 4096)]


def olmo() -> BatchSizeSchedule:
    return BatchSizeSchedule(OLMO, total_tokens=658e9, tokens_per_sample=4096)


def walked(
    thresholds: list[tuple[int, int]], total: int, of_a_sample: int
) -> list[tuple[int, int]]:
    """The tokens before each step, and its batch size, one step after another."""
    steps, trained = [], 0
    while trained < total:
        steps.append((trained, [size for at, size in thresholds if at <= trained][-1]))
        trained += steps[-1][1] * of_a_sample
    return steps


def test_merrill() -> None:
    saved = olmo().steps_saved(against=1024)
    assert (saved.scheduled, saved.fixed) == (89_229, 156_880)  # 89.2k / 156.9k
    assert f"{saved.share:.1%}" == "43.1%"
    assert "same tokens, same FLOPs" in str(olmo()) and "43.1 % fewer" in str(olmo())


@pytest.mark.parametrize(
    "thresholds",
    [
        [(0, 3)],
        [(0, 3), (210, 7)],  # at a boundary
        [(0, 3), (211, 7)],  # one token after it
        [(0, 3), (209, 7)],
        [(0, 3), (1, 5), (2, 7)],  # one is jumped over
        [(0, 8), (400, 4), (500, 2)],  # shrinks
        [(0, 3), (5000, 7)],  # beyond the end
    ],
)
@pytest.mark.parametrize("total", [1, 999, 1000, 1050])
def test_steps_are_those_of_a_run(thresholds: list[tuple[int, int]], total: int) -> None:
    schedule = BatchSizeSchedule(thresholds, total, tokens_per_sample=10)
    sizes = [size for _, size in walked(thresholds, total, 10)]
    assert schedule.steps == len(sizes)
    assert [s.batch_size for s in schedule.stages for _ in range(s.steps)] == sizes
    for trained, size in walked(thresholds, total, 10):
        assert schedule.batch_size_at(trained) == size
        assert schedule.batch_size_at(trained + size * 10 - 1) == size
    assert schedule.batch_size_at(trained + 10**6) == sizes[-1]


def test_seconds_are_measured_ones() -> None:
    schedule = BatchSizeSchedule([(0, 4), (80, 8), (10**6, 16)], 240, tokens_per_sample=10)
    saved = schedule.seconds_saved({4: 1.0, 8: 1.5}, against=4)  # 16 is never reached
    assert (saved.scheduled, saved.fixed, saved.saved) == (5.0, 6.0, 1.0)
    with pytest.raises(ValueError, match="no time for a step of 8 samples"):
        schedule.seconds({4: 1.0, 16: 2.0})
    with pytest.raises(ValueError, match="must be positive, not nan"):
        schedule.seconds({4: 1.0, 8: float("nan")})


@pytest.mark.parametrize(
    ("thresholds", "said"),
    [
        ([], "at least one threshold"),
        ([(10, 4)], "first threshold must be 0 tokens, not 10"),
        ([(0, 4), (20, 8), (10, 16)], "10 tokens come after 20"),
        ([(0, 4), (0, 8)], "0 tokens come after 0"),
        ([(0, 4), (10.5, 8)], "10.5"),
        ([(0, 4), (float("nan"), 8)], "nan"),
        ([(0, 4.5)], "batch size must be a whole number of at least 1, not 4.5"),
        ([(0, 0)], "batch size must be a whole number of at least 1, not 0"),
        ([(0, True)], "at least 1, not True"),
        ([(0, "4")], "at least 1, not '4'"),
        ([(-5, 4)], "-5"),
    ],
)
def test_bad_thresholds(thresholds: list[tuple[float, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchSizeSchedule(thresholds, 100, tokens_per_sample=10)


@pytest.mark.parametrize("total", [-1, 0, float("inf"), 1.5])
def test_bad_totals(total: float) -> None:
    with pytest.raises(ValueError, match="total_tokens"):
        BatchSizeSchedule([(0, 4)], total, tokens_per_sample=10)


def decision(tokens: int, old: int, new: int) -> dict[str, object]:
    return {"kind": "decision", "tokens": tokens, "old": old, "new": new, "phase": "warm up"}


def made(*decisions: object) -> tuple[tuple[float, int], ...]:
    made = BatchSizeSchedule.from_decisions(decisions, total_tokens=1000, tokens_per_sample=1)
    return tuple(made.thresholds)


def test_from_decisions() -> None:
    phase = decision(10, 32, 32)
    doubled = SimpleNamespace(tokens=100, old=32, new=64)
    assert made(phase, doubled, decision(300, 64, 64), decision(300, 64, 128)) == (
        (0, 32),
        (100, 64),
        (300, 128),
    )
    assert made(phase) == ((0, 32),)


def test_decisions_of_a_resumed_run_replace_the_old_ones() -> None:
    first = [decision(100, 32, 64), decision(300, 64, 128)]
    assert made(*first, decision(250, 64, 128)) == ((0, 32), (100, 64), (250, 128))
    assert made(*first, decision(90, 32, 64)) == ((0, 32), (90, 64))
    assert made(*first, decision(250, 32, 64)) == ((0, 32), (250, 64))
    assert made(*first, decision(300, 64, 128)) == ((0, 32), (100, 64), (300, 128))
    with pytest.raises(ValueError, match="400 tokens changes 64 samples, but .* was 128"):
        made(*first, decision(400, 64, 128))


def test_from_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    options = {"total_tokens": 1000, "tokens_per_sample": 1}
    lines = [{"step": 1, "loss": 2.0}, decision(100, 32, 64), {"kind": "run", "format": 1}]
    log.write_text("\n".join(map(json.dumps, lines)))
    for path in (log, tmp_path):
        found = BatchSizeSchedule.from_log(path, **options)
        assert found.thresholds == ((0, 32), (100, 64))
    log.write_text(log.read_text() + '\n{"kind": "deci')  # a run that was killed
    assert BatchSizeSchedule.from_log(log, **options) == found
    for text, said in (
        ("", "no records"),
        ('{"step": 1}\n', "no decision"),
        ('{"step": 1}\n{"st\n', "line 2"),
        ('{"st', "no records"),
        ("[1]\n", "line 1"),
        ('{"kind": "decision", "tokens": 5}\n', "needs tokens, old and new"),
        ('{"kind": "decision", "tokens": -5, "old": 1, "new": 2}\n', "-5"),
    ):
        log.write_text(text)
        with pytest.raises(ValueError, match=said):
            BatchSizeSchedule.from_log(log, **options)


def test_counts() -> None:
    assert [parse_count(t) for t in ("20B", "1.5e9", "125M", "4,096", "0.5k", "1,048,576")] == [
        20 * 10**9,
        1_500_000_000,
        125 * 10**6,
        4096,
        500,
        1_048_576,
    ]
    for text in ("-1", "1.5", "", "B", "abc", "nan", "inf", "0x10", "1,5B", "4,09", "1,0000"):
        with pytest.raises(ValueError, match="must be"):
            parse_count(text)
    assert exact_count(168_000_000_001) == "168000000001"
    assert [short_count(v) for v in (99_999, 999_600, 123_456, 5e15)] == [
        "99,999",
        "1M",
        "123K",
        "5,000T",
    ]


def as_megatron_reads(text: str, seq_length: int | None) -> list[tuple[int, int]]:
    """Thresholds in samples, by the arithmetic of Megatron-LM: float times suffix, divided down."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    pairs = []
    for entry in text.split():
        first, _, size = entry.partition(":")
        number = float(first.rstrip("KMBT")) * units.get(first[-1], 1)
        pairs.append((int(number) // (seq_length or 1), int(size)))
    return pairs


def test_megatron_takes_the_same_steps() -> None:
    text = exports.megatron(olmo())
    assert text == "0:1024 168B:2048 503B:4096"
    for unit, seq_length in (("tokens", 4096), ("samples", None)):
        read = as_megatron_reads(exports.megatron(olmo(), unit=unit), seq_length)
        samples = [size for _, size in walked(read, -(-658_000_000_000 // 4096), 1)]
        assert len(samples) == olmo().steps
        assert [samples.count(s.batch_size) for s in olmo().stages] == [
            s.steps for s in olmo().stages
        ]


def test_megatron_rounds_nothing() -> None:
    def schedule(threshold: int) -> BatchSizeSchedule:
        return BatchSizeSchedule([(0, 3), (threshold, 7)], 2000, tokens_per_sample=10)

    assert exports.megatron(schedule(225)) == "0:3 225:7"  # 22 samples are no boundary, 24 are
    with pytest.raises(ValueError, match="step earlier"):
        exports.megatron(schedule(211))  # 21 samples are a boundary, which 211 tokens are after
    assert exports.megatron(schedule(211), unit="samples") == "0:3 22:7"
    with pytest.raises(ValueError, match="multiples of 10"):
        exports.megatron(schedule(9))
    assert exports.megatron(schedule(1500)) == "0:3 1500:7"
    close = BatchSizeSchedule([(0, 3), (211, 5), (219, 7)], 2000, tokens_per_sample=10)
    assert exports.megatron(close, unit="samples") == "0:3 22:7"  # 5 is never reached
    with pytest.raises(ValueError, match="'steps'"):
        exports.megatron(schedule(210), unit="steps")


def test_megatron_ramp() -> None:
    schedule = BatchSizeSchedule([(0, 8), (800, 12), (1600, 16)], 4000, tokens_per_sample=10)
    ramp = exports.megatron_ramp(schedule)
    assert ramp.train_samples == 10 * 8 + 7 * 12 + 15 * 16
    for pairs, said in (
        ([(0, 8), (800, 16), (1600, 32)], "equal increments"),
        ([(0, 16), (800, 12), (1600, 8)], "equal increments"),
        ([(0, 8), (801, 12), (802, 16)], "has to reach every size"),
        ([(0, 8), (800, 12), (3000, 16)], "after 80, 308"),
    ):
        with pytest.raises(ValueError, match=said):
            exports.megatron_ramp(BatchSizeSchedule(pairs, 4000, tokens_per_sample=10))


def test_olmo_core() -> None:
    fields = exports.olmo_core(olmo())
    assert fields["batch_sizes"] == [4_194_304, 8_388_608, 16_777_216]
    assert fields["schedule"][1] == {"value": 168_000_000_000, "unit": "tokens"}
    shrinking = BatchSizeSchedule([(0, 8), (50, 4)], 100, tokens_per_sample=2)
    assert exports.olmo_core(shrinking)["batch_sizes"] == [16, 8]
    for sizes in ((4, 6), (6, 4), (4, 4)):
        schedule = BatchSizeSchedule([(0, sizes[0]), (50, sizes[1])], 100, 1)
        with pytest.raises(ValueError, match="OLMo-core cannot"):
            exports.olmo_core(schedule)


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["schedule", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    assert code == 0 or (result.stdout == "" and result.stderr.count("\n") == 1)
    return result.output


def test_command(tmp_path: Path) -> None:
    run = ("--total-tokens", "658B", "--tokens-per-sample", "4096")
    text = "0:1024 168B:2048 503B:4096"
    said = invoke(text, *run, "--export", "megatron", "--step-seconds", "1024:2 2048:3 4096:5")
    assert "43.1 % fewer" in said and "same FLOPs" in said
    assert "68 hours instead of 87, 21.6 % less, by the step times that you gave" in said
    assert '--step-batch-size-schedule "0:1024 168B:2048 503B:4096"' in said
    assert "--train-samples 160646144" in said and "megatron-core 0.16.1 does not" in said
    assert "The older ramp cannot give these steps" in said
    even = ("0:8 800:12 1600:16", "--total-tokens", "4000", "--tokens-per-sample", "10")
    ramp = "--rampup-batch-size 8 4 160 --global-batch-size 16"
    assert ramp in invoke(*even, "--export", "megatron")
    late = ("0:4 90:16", "--total-tokens", "2000", "--tokens-per-sample", "10")
    assert "changes to 16 samples 1 step of 4 samples late, because" in invoke(
        *late, "--export", "olmo-core"
    )
    mine = ("0:32 2000:64 7000:128", "--total-tokens", "20000", "--tokens-per-sample", "10")
    said = invoke(*mine, "--export", "huggingface", "--per-device-batch", "32")
    assert said.count("max_steps=63") == 2
    assert "changes to 64 samples 1 step of 32 samples late, changes to 128 samples 1 step" in said
    found = json.loads(invoke(text, *run, "--json", "--export", "olmo-core"))
    assert found["steps"]["scheduled"] == 89_229
    assert found["export"]["value"]["batch_sizes"][0] == 4_194_304
    log = tmp_path / "run.jsonl"
    log.write_text(json.dumps(decision(168 * 10**9, 1024, 2048)))
    assert "of 2,048 samples each" in invoke(str(log), *run, "--against", "2048")
    log.write_text("")
    assert "no records" in invoke(str(log), *run, code=2)
    assert "neither a log" in invoke("nowhere", *run, code=2)
    for tool in ("torchtitan", "huggingface", "lightning"):
        said = invoke(text, *run, "--export", tool, code=2)
        assert f"--export {tool} needs --per-device-batch" in said
    assert "or 'lightning', not 'jax'" in invoke(text, *run, "--export", "jax", code=2)
    bad = ("--total-tokens", "-5", "--tokens-per-sample", "4096")
    assert "--total-tokens is '-5'" in invoke(text, *bad, code=2)

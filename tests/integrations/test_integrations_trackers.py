# SPDX-License-Identifier: Apache-2.0
"""Trackers write what their own readers read back; no number is made up."""

import builtins
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from noise_cases import draw, make, one_update

import gnsfast
from gnsfast.integrations.trackers import (
    JSONLTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    metrics,
)
from gnsfast.noise_scale import AdamNoiseScale, DualNoiseScale, ModuleNoiseScale, NoiseScale

SEEN = {"gns/b_simple": 12.5, "gns/b_simple_hi": math.inf, "loss": math.nan, "tokens": 4096.0}


OTHER_NAMES = ("gns/adam", "gns/sign", "gns/spectral")


def strict(line: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_metrics_of_a_run() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    for x, y in draw(8):
        with one_update(gns, len(x)):
            torch.nn.functional.cross_entropy(model(x), y).backward()
    result = gns.compute()
    assert result.resolved
    found = metrics(result, tokens=640, batch_tokens=80.0, per_module=True)
    assert {k: v for k, v in found.items() if not k.startswith("gns/layer")} == {
        "gns/b_simple": result.noise_scale,
        "gns/b_simple_lo": result.lower,
        "gns/b_simple_hi": result.upper,
        "gns/trace": result.trace,
        "gns/grad_sq": result.grad_sqnorm,
        "gns/covered": 1.0,
        "gns/covered_norm": 1.0,
        "gns/updates": 8.0,
        "gns/skipped": 0.0,
        "gns/drift": 0.0,
        "batch/size": 8.0,
        "batch/tokens": 80.0,
        "tokens": 640.0,
    }
    layers = {f"gns/layer_lo/{path}": m.lower for path, m in result.per_module.items()}
    for path, m in result.per_module.items():
        if m.resolved:
            layers |= {f"gns/layer/{path}": m.noise_scale, f"gns/layer_hi/{path}": m.upper}
    assert {k: v for k, v in found.items() if k.startswith("gns/layer")} == layers and layers


@pytest.mark.parametrize("mean", [math.inf, 53.8])
def test_metrics_of_what_is_not_resolved(mean: float) -> None:
    """The lower end is all that is known, also where the ratio of the means is a number."""
    layer = ModuleNoiseScale(mean, 3.0, math.inf, 2.0, -1.0)
    result = NoiseScale(
        **vars(layer), drift=True, updates=6, skipped=1, samples=48, per_module={"0": layer}
    )
    assert metrics(result, per_module=True) == {
        "gns/b_simple_lo": 3.0,
        "gns/trace": 2.0,
        "gns/grad_sq": -1.0,
        "gns/updates": 6.0,
        "gns/skipped": 1.0,
        "gns/drift": 1.0,
        "batch/size": 8.0,
        "gns/layer_lo/0": 3.0,
    }


def test_metrics_of_other_noise_scales() -> None:
    result = NoiseScale(
        **vars(ModuleNoiseScale(10.0, 8.0, 13.0, 2.0, 0.2)),
        **{"drift": False, "updates": 6, "skipped": 0, "samples": 48, "per_module": {}},
        adam=AdamNoiseScale(20.0, 15.0, 30.0, 1.0, 0.05, 6),
        sign=DualNoiseScale(40.0, 32.0, 50.0, 2.0, 0.3, 0.4, "sign", 5, (), {}),
        spectral=DualNoiseScale(math.inf, 7.0, math.inf, 2.0, -0.1, 0.4, "spectral", 5, (), {}),
    )
    found = metrics(result)
    assert {k: v for k, v in found.items() if k.split("_")[0] in OTHER_NAMES} == {
        **{"gns/adam": 20.0, "gns/adam_lo": 15.0, "gns/adam_hi": 30.0},
        **{"gns/sign": 40.0, "gns/sign_lo": 32.0, "gns/sign_hi": 50.0},
        "gns/spectral_lo": 7.0,
    }
    assert found["gns/b_simple"] == 10.0


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    for step in (1, 2):  # a resumed run appends
        tracker = JSONLTracker(path)
        assert isinstance(tracker, Tracker)
        tracker.log({**SEEN, "tensor": torch.tensor(2.5)}, step)
        assert len(path.read_text().splitlines()) == step  # before close
        tracker.close()
    assert [strict(line) for line in path.read_text().splitlines()] == [
        {
            "step": step,
            "gns/b_simple": 12.5,
            "gns/b_simple_hi": None,
            "loss": None,
            "tokens": 4096.0,
            "tensor": 2.5,
        }
        for step in (1, 2)
    ]


def test_jsonl_records(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tracker = JSONLTracker(path, run={"name": "a"})
    tracker.record({"kind": "decision", "upper": math.inf, "in": [{"x": (math.nan, 1)}], "n": 2})
    with pytest.raises(ValueError, match="a record needs a 'kind'"):
        tracker.record({"upper": 1.0})
    tracker.close()
    tracker.close()
    assert [strict(line) for line in path.read_text().splitlines()] == [
        {"kind": "run", "format": 1, "name": "a"},
        {"kind": "decision", "upper": None, "in": [{"x": [None, 1]}], "n": 2},
        {"kind": "end"},
    ]


@pytest.mark.parametrize(
    "left, kept",
    [
        ('{"step": 1}\n{"step": 2, "lo', '{"step": 1}\n'),
        ('{"step": 1}\n{"step": 2}', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n' + '{"x": "' + 70000 * "y", '{"step": 1}\n'),
        ('{"st', ""),
        ("", ""),
    ],
)
def test_jsonl_after_a_crash(tmp_path: Path, left: str, kept: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(left)
    tracker = JSONLTracker(path)
    tracker.log({}, 3)
    tracker.close()
    assert path.read_text() == kept + '{"step": 3}\n'


def test_jsonl_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not\na log")
    with pytest.raises(ValueError, match="so it is no log"):
        JSONLTracker(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "not\na log"


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    assert isinstance(tracker, Tracker)
    tracker.log(SEEN, 10)
    tracker.log({"gns/b_simple": 13.0}, 20)
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["gns/b_simple", "tokens"]
    assert [(e.step, e.value) for e in events.Scalars("gns/b_simple")] == [(10, 12.5), (20, 13.0)]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Of W&B's log: 7 bytes of its own, then checksum, length, kind and data of each."""
    assert len(log) < 32768  # one block, so no record is split
    start = 7
    while start + 7 <= len(log):
        length, kind = struct.unpack_from("<HB", log, start + 4)
        assert kind == 1
        if start + 7 + length > len(log):
            return  # it is being written
        yield log[start + 7 : start + 7 + length]
        start += 7 + length


def finished_run(path: Path) -> list[Any]:
    """W&B's records once its process has written the last: ``finish`` may return before."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(600):
        records = [Record.FromString(data) for data in leveldb_records(path.read_bytes())]
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.1)
    raise AssertionError(f"W&B has not finished {path.name} in a minute")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "300")  # W&B gives its process 30 s to start
    tracker = WandbTracker(project="gns", dir=str(tmp_path))
    assert isinstance(tracker, Tracker)
    tracker.log(SEEN, 10)
    WandbTracker(tracker.run).close()  # another's run stays open
    tracker.log({"gns/b_simple": 13.0, "tokens": 8192.0}, 20)
    tracker.close()
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, axes = [], {}
    for record in finished_run(path):
        if items := record.history.item:
            values = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({k: v for k, v in values.items() if not k.startswith("_")})
        if (metric := record.metric).step_metric:
            axes[metric.glob_name or metric.name] = metric.step_metric
    assert rows == [
        {"gns/b_simple": 12.5, "tokens": 4096.0, "step": 10},
        {"gns/b_simple": 13.0, "tokens": 8192.0, "step": 20},
    ]
    assert axes["gns/*"] == axes["batch/*"] == "tokens"
    with pytest.raises(TypeError, match="an open run, .* or a project"):
        WandbTracker()


@pytest.mark.parametrize(
    "make, package",
    [
        (lambda: TensorBoardTracker("x"), "tensorboard"),
        (lambda: WandbTracker(project="x"), "wandb"),
    ],
)
def test_missing_package(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if package in name:
            raise ImportError(name)
        return real(name, *args)

    for name in [n for n in sys.modules if package in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        make()


def test_imports_are_lazy() -> None:
    """Neither the package nor the trackers import a framework; a missing one is named."""
    code = (
        "import sys, gnsfast, gnsfast.integrations, gnsfast.integrations.trackers\n"
        "frameworks = {'transformers', 'accelerate', 'lightning', 'pytorch_lightning', 'wandb'}\n"
        "frameworks.add('tensorboard')\n"
        "assert not frameworks & set(sys.modules), frameworks & set(sys.modules)\n"
        "sys.modules |= dict.fromkeys(frameworks)\n"
        "for name in ('transformers', 'lightning'):\n"
        "    try:\n"
        "        __import__(f'gnsfast.integrations.{name}')\n"
        "    except ImportError as e:\n"
        "        assert 'pip install' in str(e), e\n"
        "    else:\n"
        "        raise AssertionError(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

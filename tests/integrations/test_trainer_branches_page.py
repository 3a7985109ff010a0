# SPDX-License-Identifier: Apache-2.0
"""The page on branches of a Trainer's run: its two programs measure a critical batch size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnsfast.critical_batch import CriticalBatch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trainer-branches.md"
SCRIPT = """
import os
from dataclasses import dataclass
import torch, transformers

@dataclass
class Own:
    resume_from_checkpoint: str | None = None

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}

class Trainer(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        log.write(f"{len(inputs['x'])} {self.optimizer.param_groups[0]['lr']:.8f}\\n")
        return super().training_step(model, inputs, *args, **kwargs)

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
[args] = parser.parse_args_into_dataclasses()
torch.manual_seed(0)
data = [{"x": (x := torch.randn(3)), "labels": x.sum(0, keepdim=True)} for _ in range(400)]
trainer = Trainer(Model(3, 1), args, train_dataset=data)
log = open(args.output_dir.rstrip("/") + ".log" if "BRANCH" not in os.environ
           else os.environ["LOGS"] + os.environ["BRANCH"].split()[1], "w", buffering=1)
"""
ARGUMENTS = """--use_cpu=True --report_to=none --max_steps=100 --per_device_train_batch_size=4
--learning_rate=1e-2 --lr_scheduler_type=constant --disable_tqdm=True""".split()


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    """Each branch has its own batch and learning rate, from the checkpoint on."""
    own, run = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "train.py").write_text(SCRIPT + own)
    arguments = "".join(f"{word!r}, " for word in ARGUMENTS)
    (tmp_path / "branches.py").write_text(
        run.replace('"train.py", *words', f'"train.py", {arguments}*words')
    )

    def start(*words: Any) -> str:
        environment = {**os.environ, "LOGS": f"{tmp_path}/log-", "OMP_NUM_THREADS": "1"}
        how = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment}
        done = subprocess.run([*map(str, words)], **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train = [sys.executable, "train.py", *ARGUMENTS, "--output_dir=run", "--save_steps=20"]
    start(*train, "--gradient_accumulation_steps=2", "--max_steps=20", "--logging_steps=20")
    command = [Path(sys.executable).with_name("gnsfast"), "branch", "branches.py:TrainerScript"]
    start(*command, "--tokens", 1024, "--out", "cbs", "--no-noise-scale", "--k", "0.5,1,2")
    found = CriticalBatch.load(tmp_path / "cbs")
    assert [(b.batch_size, b.steps, b.tokens) for b in found.branches] == [
        (4, 16, 1024),
        (8, 8, 1024),
        (16, 4, 1024),
    ]
    for branch in found.branches:
        steps = (tmp_path / f"log-{16 * branch.batch_size}").read_text().split("\n")[:-1]
        rate = f"{1e-2 * branch.lr_factor:.8f}"
        assert steps == [f"4 {rate}"] * (branch.steps * branch.batch_size // 4)
    losses = (tmp_path / "cbs" / "branch-1x" / "steps.jsonl").read_text().splitlines()
    first, last = (json.loads(losses[at])["loss"] for at in (0, -1))
    assert found.tokens == 2560 and 0 < last < first

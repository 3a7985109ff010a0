# SPDX-License-Identifier: Apache-2.0
"""What needs a fresh process: peak memory, start-up."""

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.apart import printed


def ask(what: str, *arguments: str) -> Any:
    """What ``python -m benchmarks.cpu.fresh what ...`` answers."""
    return json.loads(printed("cpu.fresh", what, *arguments).splitlines()[-1])


def memory(name: str, threads: str) -> float:
    """MiB that a model and three training steps add to the process."""
    import torch

    from benchmarks import contestants, measure
    from benchmarks.contestants import cases

    torch.set_num_threads(int(threads))
    contestant = contestants.named(name)
    small = cases.linear(cases.LayerCase("small", 8, 8, 2, 4))
    small.prepare(contestant).run()  # imports, and the linear algebra library's own buffers
    before = measure.resident("VmRSS")
    step = cases.training_step(contestant)
    for _ in range(3):
        step()
    return measure.resident() - before


def start() -> dict[str, float]:
    """Seconds of both imports, and of learning the table of the small GPT."""
    seconds = {}
    begin = time.perf_counter()
    import torch

    seconds["import torch"] = time.perf_counter() - begin
    begin = time.perf_counter()
    import gnsfast

    seconds["import gnsfast"] = time.perf_counter() - begin
    from benchmarks.networks import GPT, gpt_batch

    torch.manual_seed(0)
    model = GPT()
    batch = gpt_batch(GPT)[0]
    begin = time.perf_counter()
    gnsfast.learn(model, batch)
    seconds["table of the small GPT"] = time.perf_counter() - begin
    return seconds


def medians(answers: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in answers) for key in answers[0]}


if __name__ == "__main__":
    what = {"memory": memory, "start": start}[sys.argv[1]]
    print(json.dumps(what(*sys.argv[2:])))

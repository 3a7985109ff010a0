# SPDX-License-Identifier: Apache-2.0
"""What needs a fresh process: peak memory, start-up, the first compiled step."""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from benchmarks.apart import printed

NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
"""Or the first step would find what an earlier run compiled."""


def ask(what: str, *arguments: str, **environment: str) -> Any:
    """What ``python -m benchmarks.cpu.fresh what ...`` answers."""
    answer = printed("cpu.fresh", what, *arguments, environment=os.environ | environment)
    return json.loads(answer.splitlines()[-1])


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
    """Seconds of both imports, and of what the first batch shows of the small GPT."""
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
    gnsfast.configure(model, example=gpt_batch(GPT)[0])
    seconds["first batch of the small GPT"] = gnsfast.coverage(model).seconds
    return seconds


def compiled(name: str, threads: str, rounds: str) -> dict[str, Any]:
    """Seconds of a compiled step's first call, without caches; then its time beside plain's. The
    check comes last: before, it would have been the first call.
    """
    import torch

    from benchmarks import contestants, measure
    from benchmarks.contestants import cases, gate

    torch.set_num_threads(int(threads))
    contestant = contestants.named(name)
    step = cases.compiled_step(contestant)
    seconds = measure.wall_seconds(step)
    plain = step if name == "plain" else cases.compiled_step(contestants.PLAIN)
    timings = measure.interleave({"plain": plain, name: step}, int(rounds))
    problem = cases.one_layer_gpt()
    truth = gate.single_samples(problem)
    compiled = replace(problem, loss_of=torch.compile(problem.loss_of))
    if complaint := gate.judge(contestant, compiled, truth, gate.OURS).complaint:
        raise RuntimeError(f"compiled, {name} is wrong: {complaint}")
    return {"seconds": seconds, "timing": asdict(timings[name])}


def medians(answers: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in answers) for key in answers[0]}


if __name__ == "__main__":
    what = {"memory": memory, "start": start, "compiled": compiled}[sys.argv[1]]
    print(json.dumps(what(*sys.argv[2:])))

# SPDX-License-Identifier: Apache-2.0
"""The benchmark's contestants are right, and its gate lets no wrong one through."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import contestants, measure  # noqa: E402
from benchmarks.contestants import (  # noqa: E402  # noqa: E402
    ALL,
    GNSFAST,
    PLAIN,
    Contestant,
    Session,
    cases,
    formulas,
    gate,
)
from benchmarks.contestants.cases import LayerCase  # noqa: E402
from benchmarks.contestants.sessions import PIECE, Gnsfast, row_sqnorms  # noqa: E402
from benchmarks.cpu import fresh
from benchmarks.cpu import parts as cpu  # noqa: E402
from benchmarks.networks import GPT  # noqa: E402

RIVALS = [c for c in ALL if c is not PLAIN]

pytestmark = pytest.mark.usefixtures("global_flags")


class TinyGPT(GPT):
    B, T, vocabulary = 3, 7, 19

    def __init__(self) -> None:
        super().__init__(16, 2, 1)


def problems() -> list[cases.Problem]:
    """A model; and linears on both sides of FastDP's rule, with one token a sample, and a norm."""
    shapes = [(24, 40, 5, 20), (6, 4, 5, 20), (24, 40, 1, 3)]
    linears = [cases.linear(LayerCase("tiny", I, O, T, tokens)) for I, O, T, tokens in shapes]
    torch.manual_seed(1)
    norm = cases.layer_problem("norm", nn.LayerNorm(8), torch.randn(3, 5, 8), 8)
    words = cases.layer_problem("words", nn.Embedding(9, 4), torch.randint(0, 9, (3, 8)), 4)
    return [cases.small_gpt(TinyGPT), *linears, norm, words]


@pytest.mark.parametrize("contestant", RIVALS, ids=lambda c: c.name)
def test_contestants_are_right(contestant: Contestant) -> None:
    if reason := contestant.missing():
        pytest.skip(reason)
    for problem in problems():
        verdict = gate.judge(contestant, problem, gate.single_samples(problem))
        assert not verdict.complaint, (problem.layer, verdict.complaint)
        if "LayerNorm" in verdict.uncovered:
            assert contestant.name == "BackPACK" and verdict.covered < 1
        else:
            assert verdict.covered == 1 and not verdict.uncovered
            assert verdict.error is not None and verdict.error < 1e-5


def test_each_samples_norm_by_hand() -> None:
    """The gate's own loop, on a layer whose norms are products: ||x||² ||dy||² / B² for a mean."""
    problem = cases.linear(LayerCase("tiny", 6, 4, 1, 3))
    x, dy = (t.double() for t in problem.batch)
    truth = gate.single_samples(problem)
    want = x.square().sum((1, 2)) * dy.square().sum((1, 2))
    torch.testing.assert_close(truth.sqnorms["weight"], want.detach())
    mean = cases.small_gpt(TinyGPT)
    loss = mean.loss_of(mean.model, mean.batch)
    grads = torch.autograd.grad(loss, list(mean.model.parameters()))
    for (name, _), g in zip(mean.model.named_parameters(), grads):
        torch.testing.assert_close(gate.single_samples(mean).grads[name].float(), g)


def test_row_sqnorms_of_long_and_short_rows() -> None:
    for P in (1, 40, PIECE, 2 * PIECE + 5):
        g = torch.randn(2, P)
        torch.testing.assert_close(row_sqnorms(g), g.square().sum(1))


def test_mixed_ghost_norms_decide_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 400 weights 2 T² is 392 for T = 14, 450 for T = 15: only then a gradient is there."""
    for T, want in ((14, []), (15, [(2, 20, 20)])):
        shapes: list[tuple[int, ...]] = []
        norms = lambda g, shapes=shapes: shapes.append(tuple(g.shape)) or row_sqnorms(g)
        monkeypatch.setattr(formulas, "row_sqnorms", norms)
        problem = cases.linear(LayerCase("tiny", 20, 20, T, 2 * T))
        problem.prepare(contestants.named("mixed ghost norms, as FastDP")).run()
        assert [shape for shape in shapes if len(shape) == 3] == want


class OneSampleOff(Session):
    def run(self) -> None:
        super().run()
        right = gate.single_samples(cases.Problem("", 1, self.model, self.loss_of, self.batch))
        self._sqnorms = {n: s.float() for n, s in right.sqnorms.items()}
        self._sqnorms["head.weight"][1] *= 1.002


class AddsUp(OneSampleOff):
    """Right the first time; then it has not forgotten."""

    def run(self) -> None:
        super().run()
        self._sqnorms["head.weight"][1] /= 1.002

    def clear(self) -> None:
        self._sqnorms = {}


class Stale(OneSampleOff):
    """Norms of the batch that it saw first."""

    def run(self) -> None:
        known = self._sqnorms
        super().run()
        self._sqnorms["head.weight"][1] /= 1.002
        self._sqnorms = known or self._sqnorms

    def clear(self) -> None:
        known = self._sqnorms
        super().clear()
        self._sqnorms = known


class FirstWeights(OneSampleOff):
    """Norms of the weights that it saw first."""

    def take_over(self) -> None:
        self.first = copy.deepcopy(self.model)

    def run(self) -> None:
        Session.run(self)
        frozen = cases.Problem("", 1, self.first, self.loss_of, self.batch)
        self._sqnorms = {n: s.float() for n, s in gate.single_samples(frozen).sqnorms.items()}


class Refuses(Session):
    def run(self) -> None:
        raise NotImplementedError("no such layer\nand more")


class NoGradients(Session):
    def run(self) -> None:
        pass


class NotANumber(Session):
    def run(self) -> None:
        super().run()
        self._sqnorms = {"norm.weight": torch.full((self.B,), float("nan"))}


class SumOnly(Session):
    def run(self) -> None:
        super().run()
        self._sqnorms = {"norm.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        (OneSampleOff, "head.weight: a sample's squared norm is off by 2.0e-03"),
        (AddsUp, ".grad is off by 2.8e+00"),
        (Stale, "a sample's squared norm is off by"),
        (FirstWeights, "a sample's squared norm is off by"),
        (Refuses, "raises NotImplementedError: no such layer"),
        (NoGradients, "no .grad"),
        (NotANumber, "off by inf"),
        (SumOnly, "norm.weight: norms of shape [1], B = 3"),
    ],
)
def test_the_gate_catches(planted: Any, complaint: str) -> None:
    problem = cases.small_gpt(TinyGPT)
    verdict = gate.judge(Contestant("planted", planted), problem, gate.single_samples(problem))
    assert complaint in verdict.complaint


def test_a_missing_input_gradient_is_a_complaint() -> None:
    """Of a layer's three products it would save one."""

    class NoInputGradient(Session):
        def run(self) -> None:
            self.loss_of(self.model, tuple(t.detach() for t in self.batch)).backward()

    problem = cases.linear(LayerCase("tiny", 6, 4, 2, 6))
    verdict = gate.judge(Contestant("x", NoInputGradient), problem, gate.single_samples(problem))
    assert verdict.complaint == "input 0: no .grad"


@pytest.mark.parametrize("wrong", [0, 5, 9, 3])
def test_a_whole_batch_is_checked_at_three_samples(wrong: int) -> None:
    class OneOff(Gnsfast):
        def sqnorms(self) -> dict[str, Tensor]:
            for sqnorm_B in self._sqnorms.values():
                sqnorm_B[wrong] *= 1.01
            return self._sqnorms

    problem = cases.linear(LayerCase("tiny", 6, 4, 2, 20))
    truth = gate.single_samples(problem, gate.spots(problem.B))
    found = gate.wrong_at_full_size(problem.prepare(Contestant("x", OneOff)), truth)
    assert found == ("" if wrong == 3 else "weight: at B = 10 a squared norm is off by 1.0e-02")
    assert gate.wrong_at_full_size(problem.prepare(GNSFAST), truth) == ""
    assert problem.batch[0].grad is None


def test_the_operators_ways_are_checked() -> None:
    case = LayerCase("tiny", 6, 4, 2, 20)
    ways = cases.weight_gradients(case)
    cpu.check_operator(case, ways)
    dw, sqnorm_B = ways["loop"]()
    with pytest.raises(SystemExit, match="loop: dW of tiny 6x4 T=2 is off by 1.0e"):
        cpu.check_operator(case, ways | {"loop": lambda: (2 * dw, sqnorm_B)})
    with pytest.raises(AssertionError, match="not close"):
        cpu.check_operator(case, ways | {"loop": lambda: (dw, sqnorm_B.flip(0))})
    with pytest.raises(AssertionError, match="not close"):
        cpu.check_operator(case, ways | {"gnsfast": lambda: (dw, 1.0001 * sqnorm_B)})


def test_a_missing_package_is_named() -> None:
    absent = Contestant("absent", Session, needs=(("no_such_module", "no-such==1.0"),))
    said = "no_such_module is not installed: pip install no-such==1.0"
    problem = cases.small_gpt(TinyGPT)
    assert absent.missing() == said
    assert gate.judge(absent, problem, gate.single_samples(problem)).complaint == said


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, gnsfast, a wrong contestant, a missing one, a slow one and one that needs memory."""
    absent = Contestant("absent", Session, needs=(("no_such_module", "no-such==1.0"),))
    few = (
        PLAIN,
        GNSFAST,
        Contestant("wrong", NoGradients),
        absent,
        contestants.named("loop of single samples"),
        contestants.named("one GEMM, as nanoGNS"),
    )
    monkeypatch.setattr(gate, "ALL", few)
    monkeypatch.setattr(cases, "OVER_T", [LayerCase("tiny", 12, 8, 3, 24)])
    monkeypatch.setattr(cpu, "BYTES", 1000)
    monkeypatch.setattr(cases, "OPERATOR", [LayerCase("tiny", 12, 8, T, 24) for T in (1, 3)])
    small_gpt = cases.small_gpt
    monkeypatch.setattr(cases, "small_gpt", lambda: small_gpt(TinyGPT))
    cpu.verdicts.cache_clear()
    yield
    cpu.verdicts.cache_clear()


def test_tables_of_the_cpu_suite(tiny_suite: None, capsys: Any) -> None:
    """Who is right is timed in the same rounds; who is not is listed with the reason."""
    command.main(["cpu", "--only", "coverage", "lengths", "--threads", "1", "--rounds", "5"])
    out = capsys.readouterr().out
    assert "| absent | - |" in out.replace("None", "-") and "pip install no-such==1.0" in out
    tables = cpu.lengths([1], 3)
    rows, left_out = tables["Overhead against T"], tables["Overhead against T: left out"]
    assert [row["contestant"] for row in rows] == ["plain", "gnsfast", "loop of single samples"]
    assert all(row["ms"] > 0 and row["ratio"].ratio > 0 for row in rows)
    about = {"layer", "T", "B", "threads", "contestant", "rounds", "ms", "ratio"}
    assert rows[0].keys() == about and rows[0]["rounds"] == 5
    assert (rows[1]["covered"], rows[1]["per sample"]) == (1, "yes")
    reasons = {row["contestant"]: row["reason"] for row in left_out}
    assert reasons.keys() == {"wrong", "absent", "one GEMM, as nanoGNS"}
    assert "no .grad" in reasons["wrong"] and "GiB" in reasons["one GEMM, as nanoGNS"]
    (rows,) = cpu.operator([1], 3).values()
    assert rows[1]["weight gradient"] == "tiny 12x8 T=3" and rows[1]["Gram"].ratio > 0


def test_whole_steps(tiny_suite: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time with each number of threads, memory with the last; who is wrong is not there."""
    asked = []

    def ask(what: str, name: str, threads: str) -> float:
        asked.append((what, threads))
        return 3.0 if name == GNSFAST.name else 2.0

    monkeypatch.setattr(fresh, "ask", ask)
    monkeypatch.setattr(cases, "training_step", lambda c: cases.small_gpt().prepare(c).run)
    # Two threads for matrices as small as these wait for each other where a test runs beside.
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    (rows,) = cpu.step([1, 2], 5).values()
    names = ["plain", "gnsfast", "loop of single samples", "one GEMM, as nanoGNS"]
    assert [(row["threads"], row["contestant"]) for row in rows] == [
        (threads, name) for threads in (1, 2) for name in names
    ]
    assert asked == [("memory", "2")] * (2 * 12 + 2 * 3)
    assert [row["rounds"] for row in rows[:4]] == [20, 20, 5, 5]
    assert [row.get("memory") for row in rows] == [None] * 4 + [1.0, 1.5, 1.0, 1.0]
    assert [row.get("per sample") for row in rows[:4]] == [None, "yes", "yes", "sum only"]
    assert all(row["ms"] > 0 and row["ratio"].ratio > 0 for row in rows)


class SlightlyOff(Gnsfast):
    def sqnorms(self) -> dict[str, Tensor]:
        return {name: 1.0005 * norms_B for name, norms_B in super().sqnorms().items()}


class Forgets(Gnsfast):
    def sqnorms(self) -> dict[str, Tensor]:
        return dict(list(super().sqnorms().items())[1:])


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (NoGradients, "gnsfast is wrong on .*no .grad"),
        (SlightlyOff, "gnsfast is wrong on .*a squared norm is off by 5.0e-04"),
        (Forgets, "gnsfast covers .* not 1 "),
    ],
)
def test_nothing_is_timed_while_gnsfast_is_wrong(
    tiny_suite: None, monkeypatch: pytest.MonkeyPatch, planted: Any, said: str
) -> None:
    monkeypatch.setattr(gate, "ALL", (PLAIN, Contestant(GNSFAST.name, planted)))
    for part in (cpu.coverage, cpu.lengths):
        with pytest.raises(SystemExit, match=said):
            part([1], 5)


def test_too_few_rounds_have_no_quartiles(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.main(["cpu", "--rounds", "4"])
    assert "4 rounds have no quartiles" in capsys.readouterr().err


def test_interleaved_rounds() -> None:
    """Ratios are taken within a round of a machine that slows down as it runs."""
    ran: list[str] = []

    def seconds_of(run: Any) -> float:
        run()
        return (2.0 if ran[-1] == "slow" else 1.0) * 1.1 ** len(ran)

    runs = {name: (lambda name=name: ran.append(name)) for name in ("plain", "same", "slow")}
    timings = measure.interleave(runs, 8, seconds_of)
    rounds = ran[3:]
    assert rounds.count("plain") == rounds.count("slow") == 8
    assert timings["plain"].ratio == timings["plain"].upper == 1
    assert 1.1**-2 < timings["same"].lower < 1 < timings["same"].upper < 1.1**2
    assert 2 * 1.1**-2 < timings["slow"].lower < 2 < timings["slow"].upper < 2 * 1.1**2
    places = {name: {i % 3 for i, each in enumerate(rounds) if each == name} for name in runs}
    assert all(found == {0, 1, 2} for found in places.values())
    alone = measure.interleave({"plain": runs["plain"]}, 5, seconds_of)
    assert alone["plain"].ratio == 1

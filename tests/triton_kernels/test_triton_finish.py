# SPDX-License-Identifier: Apache-2.0
"""The end of an operator: how many launches it takes, the same bits whichever program arrives last,
and sizes for which every loop of the finishing kernels turns more than once.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_launches import launched, shuffled_programs
from signed import Signed

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import reference, triton_kernels
from gnsfast.triton_kernels import embedding as embeddings  # noqa: E402
from gnsfast.triton_kernels import (  # noqa: E402
    linear_plan,
    linear_wgrad,
    norms,
    operators,
    segments,
    sums,
)
from gnsfast.triton_kernels.tiles import INTERPRETED  # noqa: E402

F32, F16 = torch.float32, torch.float16
KERNELS = Signed(operators)


def layer_norm(device: str, shape: tuple[int, int, int], **more: Any) -> Callable[[], Any]:
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    w, b = (torch.randn(shape[2], device=device) for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, [shape[2]], w, b, 1e-5)
    return lambda: KERNELS.norm_backward(dy, x, mean, rstd, w, b, True, True, **more)


def rms_norm(device: str, shape: tuple[int, int, int], **more: Any) -> Callable[[], Any]:
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    w = torch.randn(shape[2], device=device)
    return lambda: KERNELS.norm_backward(dy, x, None, None, w, None, True, False, 1e-5, **more)


def embedding(device: str, B: int, T: int, D: int, **more: Any) -> Callable[[], Any]:
    ids, dy = torch.randint(0, 300, (B, T), device=device), torch.randn(B, T, D, device=device)
    return lambda: KERNELS.embedding_wgrad(dy, ids, 300, 2, F32, **more)


def embedding_of_documents(device: str) -> Callable[[], Any]:
    starts = torch.tensor([0, 4, 4, 9, 20], device=device)
    ids, dy = torch.randint(0, 300, (20,), device=device), torch.randn(20, 40, device=device)
    return lambda: KERNELS.embedding_wgrad(dy, ids, 300, -1, F32, starts)


def experts(device: str, bias: bool) -> Callable[[], Any]:
    starts = torch.tensor([0, 2, 2, 7, 9, 20, 22], device=device)
    x, dy = torch.randn(22, 200, device=device), torch.randn(22, 70, device=device)
    return lambda: KERNELS.linear_wgrad(x, dy, True, bias, False, F32, starts, 2)


def attention(device: str, wanted: list[bool], documents: bool = False) -> Callable[[], Any]:
    """Two rows a sample, or three documents."""
    B, H, K, T, D = (1 if documents else 4), 2, 1, 9, 16
    q, k, v, do = (torch.randn(B, h, T, D, device=device) for h in (H, K, K, H))
    learned = [torch.randn(n, device=device) for n in (H, H, D, D)]
    starts = torch.tensor([0, 2, 2, T], device=device) if documents else None
    pattern = None, starts, True, 0.3, 0, 0
    saved = Signed(reference).attention_forward(q, k, v, *learned, *pattern)
    samples = 3 if documents else 2
    return lambda: KERNELS.attention_backward(
        do, q, k, v, *saved, *learned, *pattern, samples, wanted
    )


EMBEDDING = ["aten.zero_", "embedding_keys_kernel", "aten.sort", "embedding_wgrad_kernel"]
EMBEDDING += ["embedding_finish_kernel"]

CALLS: dict[str, tuple[Callable[[str], Callable[[], Any]], list[str]]] = {
    "layer norm": (
        lambda device: layer_norm(device, (3, 40, 100)),
        ["norm_backward_kernel", "finish_sums_kernel"],
    ),
    "rms norm": (
        lambda device: rms_norm(device, (3, 40, 100)),
        ["norm_backward_kernel", "finish_sums_kernel"],
    ),
    "wide rms norm": (
        lambda device: rms_norm(device, (2, 1, 4101)),
        ["norm_means_kernel", "norm_backward_kernel", "finish_sums_kernel"],
    ),
    "embedding": (lambda device: embedding(device, 3, 9, 600), EMBEDDING),
    "experts": (
        lambda device: experts(device, True),
        ["linear_wgrad_segments_kernel", "segment_sums_kernel", "segments_finish_kernel"],
    ),
    "router": (
        lambda device: experts(device, False),
        ["linear_wgrad_segments_kernel", "segments_finish_kernel"],
    ),
    "attention": (
        lambda device: attention(device, [True] * 4),
        ["attention_queries_kernel", "attention_keys_kernel", "finish_sums_kernel"],
    ),
    "attention of documents": (
        lambda device: attention(device, [True, False, False, True], documents=True),
        [*["aten.zero_"] * 3, "attention_queries_kernel", "attention_keys_kernel"]
        + ["finish_sums_kernel"],
    ),
    "embedding of documents": (embedding_of_documents, EMBEDDING),
}
"""An operator's call -> what it launches."""


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_launches(case: tuple[Any, list[str]], device: str) -> None:
    make, names = case
    assert launched(make(device)) == names


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_order_of_programs(case: tuple[Any, list[str]]) -> None:
    """Whoever arrives last, the bits are the same."""
    call = case[0]("cpu")
    want = call()
    for seed in range(2):
        with shuffled_programs(seed):
            got = call()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert not any(t.isnan().any() for t in got)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU is of one maker")
def test_options_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch says ``maxnreg``, which Triton's compiler for AMD devices refuses."""
    from triton.runtime.interpreter import GridExecutor

    cached = (sums.plan, norms.plan, norms.backward, linear_plan.plan, linear_wgrad.launches)
    for plan in cached:
        plan.cache_clear()
    seen: set[str] = set()
    run = GridExecutor.__call__
    recorded = lambda self, *args, **options: seen.update(options) or run(self, *args, **options)
    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x, dy = torch.randn(3, 9, 20), torch.randn(3, 9, 36)
    linear = lambda: KERNELS.linear_wgrad(x, dy, True, True, False, F32)
    for call in (linear, *(make("cpu") for make, _ in CALLS.values())):
        call()
    assert "num_warps" in seen and "maxnreg" not in seen
    for plan in cached:
        plan.cache_clear()


def test_more_samples_than_a_grid_has_rows() -> None:
    """A grid's second and third axis end at 65,535."""
    assert sums.plan(65535, (64,), (16384,)).grid[1] == 65535
    with pytest.raises(
        ValueError, match=r"65536 samples .* pieces \(64,\) .* smaller micro-batches"
    ):
        sums.plan(65536, (64,), (16384,))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU does not say which program stores")
@pytest.mark.parametrize("count", [1, 128, 129, 1280, 5000])
def test_all_programs_clear_many_tickets(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens at a width of 8192 have 250,000 tickets: 2,000 stores of one program."""
    from triton.runtime.interpreter import interpreter_builder as builder

    stores: Counter[Any] = Counter()
    store = builder.create_masked_store
    counted = lambda *args: stores.update([builder.grid_idx]) or store(*args)
    monkeypatch.setattr(builder, "create_masked_store", counted)
    tickets, programs = torch.ones(count + 1, dtype=torch.int32), 10
    ids, N = torch.zeros(programs * embeddings.KEYS, dtype=torch.long), programs * embeddings.KEYS
    embeddings.embedding_keys_kernel[(programs,)](
        *(ids, torch.empty_like(ids), None, tickets, count, N, N, 1, 1), BLOCK=embeddings.KEYS
    )
    assert tickets[-1] == 1 and not tickets[:-1].any()
    assert max(stores.values()) <= 1 + -(-count // (128 * programs))  # and one of keys


def test_no_kernel_is_compiled_for_a_count_of_tickets() -> None:
    """One ticket, and every multiple of 16, would otherwise have a kernel of their own."""
    kernels = {}
    for file in pkgutil.iter_modules(triton_kernels.__path__):
        module = importlib.import_module(f"gnsfast.triton_kernels.{file.name}")
        found = {name: fn for name, fn in vars(module).items() if name.endswith("_kernel")}
        kernels |= {
            name: fn for name, fn in found.items() if "tickets" in getattr(fn, "arg_names", ())
        }
    assert len(kernels) == 7
    for name, fn in kernels.items():
        kept = fn.kwargs["do_not_specialize"] if INTERPRETED else fn.do_not_specialize
        assert "tickets" in kept, name


# Samples, pieces and widths of the parameters; a block is of 8192 numbers and at least 32 columns.
SIZES = {
    "one": (1, (1,), (1,)),
    "samples in parts": (530, (1,), (40,)),
    "samples of a few pieces in parts": (70, (3,), (65,)),
    "pieces of several blocks": (2, (600,), (33,)),
    "columns of several blocks": (3, (1,), (300,)),
    "wide": (20, (2,), (2100,)),
    "wider": (5, (2,), (8200,)),
    "unlike parameters": (5, (70, 9, 1, 300), (3, 100, 64, 1)),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_sums(size: tuple[int, tuple[int, ...], tuple[int, ...]], device: str) -> None:
    B, pieces, widths = size
    partials = [torch.randn(B, c, n, device=device) + 1 for c, n in zip(pieces, widths)]
    dtypes = [F32, F16, F32, F16]  # the interpreter cuts off what bfloat16 lacks
    grads = [torch.empty(n, dtype=d, device=device) for n, d in zip(widths, dtypes)]
    rows = torch.empty(len(widths), B + 2, device=device)
    plan = sums.plan(B, pieces, widths)
    plan.run(partials, grads, rows, torch.zeros(plan.tickets, dtype=torch.int32, device=device))
    for partial, grad, row in zip(partials, grads, rows.double()):
        g_BN = partial.double().sum(1)
        total_N = g_BN.sum(0)
        rtol = 2**-11 if grad.dtype == F16 else 1e-5
        torch.testing.assert_close(grad.double(), total_N, rtol=rtol, atol=1e-4)
        torch.testing.assert_close(row[:B], (g_BN**2).sum(1), rtol=1e-5, atol=0)
        torch.testing.assert_close(row[B], (total_N**2).sum(), rtol=1e-5, atol=0)
        assert row[B + 1] == 1.0


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
def test_squares_of_embeddings(
    documents: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs of several samples, and samples longer than a block."""
    monkeypatch.setattr(embeddings, "SQUARES", 64)
    ids, dy = torch.randint(0, 6, (7, 10), device=device), torch.randn(7, 10, 1100, device=device)
    dy *= torch.logspace(-2, 0, 7, device=device)[:, None, None]
    if not documents:
        starts, ends = None, list(range(0, 71, 10))
        assert embeddings.finish_config(30)["BLOCK_B"] == 1
    else:
        ends = [0, 1, 1, 45, 47, 48, 49, 70]
        starts = torch.tensor(ends, device=device, dtype=torch.int32)
        ids, dy = ids.flatten(), dy.flatten(0, 1)
    dw, rows = KERNELS.embedding_wgrad(dy, ids, 300, -1, F32, starts)
    onehot = torch.nn.functional.one_hot(ids.flatten(), 300).double()
    dy_ND = dy.double().view(-1, 1100)
    g = [onehot[i:j].T @ dy_ND[i:j] for i, j in zip(ends, ends[1:])]
    want = [t.square().sum() for t in (*g, sum(g))]
    torch.testing.assert_close(rows[0].double(), torch.stack([*want, want[0] * 0 + 1]))
    torch.testing.assert_close(dw.double(), sum(g), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [1, 3, 16])
def test_frequent_ids(piece: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and segments of several programs, which begin and end anywhere."""
    monkeypatch.setattr(embeddings, "PIECE", piece)
    ids = torch.tensor([[7] * 20, [7] * 9 + [2, 3] + [5] * 9, [5] * 14 + [280, 7, 7, 299, 2, 2]])
    ids = torch.cat([ids, torch.randint(0, 300, (1, 20))]).to(device)
    dy = torch.randn(4, 20, 530, device=device) + 1
    # A row is padding by its key alone, however the runs are cut: a rare id stands for the others.
    for padding_idx in (-1, 2, 7) if piece == 3 else (2,):
        dw, rows = KERNELS.embedding_wgrad(dy, ids, 300, padding_idx, F32)
        onehot = torch.nn.functional.one_hot(ids, 300).double()
        onehot[..., padding_idx] *= padding_idx < 0
        g = onehot.mT @ dy.double()
        g = torch.cat([g, g.sum(0, keepdim=True)])
        torch.testing.assert_close(dw.double(), g[-1], rtol=1e-5, atol=1e-5)
        want = torch.cat([g.square().sum((1, 2)), g.new_ones(1)])
        torch.testing.assert_close(rows[0].double(), want, rtol=1e-5, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
def test_order_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PIECE", 2)
    ids, dy = torch.randint(3, 5, (3, 15)), torch.randn(3, 15, 40)
    call = lambda: KERNELS.embedding_wgrad(dy, ids, 300, -1, F32)
    want = call()
    for seed in range(3):
        with shuffled_programs(seed):
            assert all(torch.equal(g, w) for g, w in zip(call(), want, strict=True))


@pytest.mark.parametrize("squares", [1, 17, 300, 1025, 5000])
def test_blocks_of_squares(squares: int) -> None:
    found = embeddings.finish_config(squares)
    assert found["BLOCK_B"] >= 1 and found["BLOCK_T"] >= min(squares, embeddings.SQUARES)


@pytest.mark.parametrize(("E", "bias"), [(1, False), (3, True)], ids=["samples", "experts, bias"])
def test_tiles_of_segments(
    E: int, bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs add the tiles' partial norms, for more samples than they add at a time."""
    monkeypatch.setattr(segments, "SHARE", 2)
    lengths = torch.randint(0, 4, (E * 67,))
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device)
    x, dy = (torch.randn(int(starts[-1]), n, device=device) for n in (200, 150))
    dw, db, rows, _ = KERNELS.linear_wgrad(x, dy, True, bias, False, F32, starts, E)
    pairs = list(zip(x.double().split(lengths.tolist()), dy.double().split(lengths.tolist())))
    weights = torch.stack([b.T @ a for a, b in pairs]).unflatten(0, (E, 67))
    biases = torch.stack([b.sum(0) for _, b in pairs]).unflatten(0, (E, 67))
    for grad, row, g in zip((dw, db), rows, (weights, biases)[: 1 + bias], strict=bias):
        torch.testing.assert_close(grad.double(), g.sum(1), rtol=1e-5, atol=1e-4)
        norms = torch.cat([g.square().flatten(2).sum((0, 2)), g.sum(1).square().sum()[None]])
        torch.testing.assert_close(
            row.double(), torch.cat([norms, norms.new_ones(1)]), rtol=1e-5, atol=0
        )

# SPDX-License-Identifier: Apache-2.0
"""The kernels of layers that are not linear, in every configuration that is compiled and read."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from gnsfast.signatures import Parameters, Pattern
from gnsfast.triton_kernels import (
    attention_backward,
    attention_forward,
    attention_tiles,
    embedding,
    norms,
    sums,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Case:
    """A kernel, the dtype of its inputs, what is constant; None for an absent tensor."""

    name: str
    fn: Any
    dtype: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    pointers: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    tensor_cores: bool = False
    aligned: bool = True
    maxnreg: int | None = None


def attention_cases() -> Iterator[Case]:
    kernels = {
        "forward": attention_forward.attention_forward_kernel,
        "queries": attention_backward.attention_queries_kernel,
        "keys": attention_backward.attention_keys_kernel,
    }
    learned = ("sinks", "logit_scale", "q_gain", "k_gain")
    absent_ones: dict[str, tuple[str, ...]] = {
        "all": ("mask", "starts"),
        "all, masked": ("starts",),
        "sinks": ("logit_scale", "q_gain", "k_gain", "mask", "starts"),
        "documents": ("mask", *learned[1:]),
    }
    runs = [("bf16", 32, "all, masked"), ("bf16", 128, "documents"), ("fp32", 64, "documents")]
    runs += [("bf16", D, what) for D in (64, 128, 256) for what in ("sinks", "all, masked")]
    runs += [("fp32", D, what) for D in (32, 64, 128, 256) for what in ("all", "sinks")]
    runs += [("fp32", D, "all, masked") for D in (32, 64, 128, 256)]
    for dtype, D, what in runs:
        tensors = {n: torch.empty(0) for n in (*learned, "mask") if n not in absent_ones[what]}
        parameters = Parameters(*(tensors.get(n) for n in learned))
        pattern = Pattern(tensors.get("mask"), None, True, 1.0, 0, 0)
        q = torch.empty(0, 0, 0, D, dtype=DTYPES[dtype])
        for name, options in attention_tiles.config(parameters, pattern, q).items():
            fn, options = kernels[name], dict(options)
            warps, stages = options.pop("num_warps"), options.pop("num_stages")
            most = options.pop("maxnreg", None)
            absent = [f"{p}_ptr" for p in absent_ones[what]]
            absent += [f"d{p}" for p in absent if p.split("_ptr")[0] in learned]
            names = fn.arg_names
            fp32 = [
                f"{n}_ptr"
                for n in ("highest", "inverse", "delta", *learned, *(f"d{p}" for p in learned))
            ]
            yield Case(
                f"attention {name} {D} {what}",
                fn,
                dtype,
                dict(CAUSAL=True, WINDOW=what == "sinks", D=D, PRECISION="ieee")
                | options
                | {n: None for n in absent if n in names},
                warps,
                stages,
                dict.fromkeys([n for n in fp32 if n in names], "*fp32")
                | {"starts_ptr": "*i32", "tickets_ptr": "*i32"},
                tensor_cores=dtype != "fp32",
                maxnreg=most,
            )


def norm_cases() -> Iterator[Case]:
    for N, rms in product((40, 768, 1024, 2048, 4095, 4096, 8192, 16384), (True, False)):
        yield from norm_case(N, rms)


def norm_case(N: int, rms: bool) -> Iterator[Case]:
    name, options = "rms" if rms else "layer", norms.config(N)
    wide = options["BLOCK_N"] < N
    stats = ("mean_ptr", "rstd_ptr", "mean_gn_ptr", "mean_g_ptr")
    pointers = dict.fromkeys((*stats, "w_ptr", "dw_ptr", "db_ptr"), "*fp32")
    pointers["tickets_ptr"] = "*i32"
    absent = ["mean_ptr", "db_ptr"] if rms else []
    absent += ["rstd_ptr"] if rms and not wide else []
    absent += [] if wide else ["mean_gn_ptr", "mean_g_ptr"]
    variant = dict(RMS=rms, WEIGHT=True)
    yield Case(
        f"norm_backward {name} {N}",
        norms.norm_backward_kernel,
        "bf16",
        dict(MEANS=wide, GAIN=True, BIAS=not rms, **variant, **dict.fromkeys(absent))
        | {key: options[key] for key in ("BLOCK_T", "BLOCK_N", "NUM_STAGES")},
        options["num_warps"],
        pointers=pointers,
        aligned=N % 16 == 0,
        maxnreg=options["maxnreg"],
    )
    if wide:
        constants = variant | dict(BLOCK_N=norms.MEANS_CONFIG["BLOCK_N"])
        constants |= dict(mean_ptr=None) if rms else {}
        warps = norms.MEANS_CONFIG["num_warps"]
        fn = norms.norm_means_kernel
        yield Case(f"norm_means {name}", fn, "bf16", constants, warps, pointers=pointers)


def sums_cases() -> Iterator[Case]:
    """The gradients are bfloat16, which needs the most conversions; blocks of samples and pieces,
    from samples of one piece to a single sample.
    """
    sizes = [(pieces, 768) for pieces in (1, 4, 16, 64, 256)]
    sizes += [(pieces, 4096) for pieces in (1, 4, 16, 64)] + [
        (pieces, 16384) for pieces in (1, 4, 16)
    ]
    for (pieces, N), parameters in product(sizes, (1, 2, 4)):
        if parameters == 4 and N > 768:
            continue  # attention
        options = dict(sums.plan(8, (pieces,) * parameters, (N,) * parameters).options)
        warps, most = options.pop("num_warps"), options.pop("maxnreg")
        each = {"partials": "*fp32", "grads": "*bf16", "pieces": "i32", "widths": "i32"}
        pointers: dict[str, str | tuple[str, ...]] = {n: (t,) * parameters for n, t in each.items()}
        pointers |= dict.fromkeys(("rows_ptr", "scratch_ptr"), "*fp32")
        pointers["tickets_ptr"] = "*i32"
        name, fn = f"finish_sums {N} {parameters} of {pieces}", sums.finish_sums_kernel
        yield Case(name, fn, "bf16", options, warps, pointers=pointers, maxnreg=most)


def embedding_cases() -> Iterator[Case]:
    names = ("dw_ptr", "square_ptr", "pieces_ptr", "sum_ptr", "row_ptr")
    pointers = dict.fromkeys(names, "*fp32") | {"order_ptr": "*i64", "ids_ptr": "*i64"}
    pointers |= {"starts_ptr": "*i32", "tickets_ptr": "*i32"}
    options = embedding.config(4096)
    meta, most = {key: options[key] for key in ("BLOCK_R", "BLOCK_D")}, options.get("maxnreg")
    for dtype, key in product(("bf16", "fp32"), ("i32", "i64")):
        constants = meta | {"PIECE": embedding.PIECE}
        kinds = pointers | {"key_ptr": f"*{key}"}
        fn, name = embedding.embedding_wgrad_kernel, f"embedding_wgrad {key}"
        yield Case(name, fn, dtype, constants, 4, pointers=kinds, maxnreg=most)
        alone = constants | {"dw_ptr": None}
        yield Case(f"{name} norms", fn, dtype, alone, 4, pointers=kinds, maxnreg=most)
    for documents, key in product((False, True), ("i32", "i64")):
        constants = {"BLOCK": embedding.KEYS} | ({} if documents else {"starts_ptr": None})
        name = f"embedding_keys {key}{' documents' * documents}"
        kinds = pointers | {"key_ptr": f"*{key}"}
        yield Case(name, embedding.embedding_keys_kernel, "bf16", constants, 4, pointers=kinds)
    for squares, documents in product((1, 64, 256, 4096), (False, True)):
        finish = dict(embedding.finish_config(squares))
        warps, most = finish.pop("num_warps"), finish.pop("maxnreg", None)
        constants = finish | ({} if documents else {"starts_ptr": None})
        constants |= {"blocks": 1} if squares in (64, 256) else {}  # as of a narrow embedding
        name = f"embedding_finish {squares}{' documents' * documents}"
        fn = embedding.embedding_finish_kernel
        yield Case(name, fn, "bf16", constants, warps, pointers=pointers, maxnreg=most)

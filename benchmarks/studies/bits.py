# SPDX-License-Identifier: Apache-2.0
"""Whether training with ``gradients="torch"`` has the losses of plain torch to the last bit: models
and ways of training, 200 steps of AdamW each.
"""

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import gnsfast
from benchmarks.record import Tables

STEPS, B, T, V, D = 200, 4, 12, 32, 16
PASSES = 2
"""Of an accumulated update."""

MEASURED: dict[str, dict[str, Any]] = {"every=1": {}, "budget=0.02": {"budget": 0.02}}


class NanoGPT(nn.Module):
    """As nanoGPT's: learnt positions, layer norms, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            D, 2, 4 * D, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks, self.norm = nn.ModuleList(layer() for _ in range(2)), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(T))
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cells(self.tokens(ids))[0])
        return logits


class Logits(nn.Module):
    """A model of transformers, of which the logits count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> nn.Module:
    return Logits(
        MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    )


def lora() -> nn.Module:
    targets = ["q_proj", "v_proj", "up_proj"]
    return Logits(get_peft_model(llama(), LoraConfig(r=4, target_modules=targets)))


def resnet() -> nn.Module:
    """Its batch norms use running statistics."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = ResNetConfig(num_channels=3, layer_type="basic", num_labels=V, **sizes)
    return Logits(ResNetForImageClassification(config).eval())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": NanoGPT,
    "Llama": lambda: Logits(llama()),
    "ResNet, batch norm in evaluation mode": resnet,
    "LSTM": LSTM,
    "Mixtral": mixtral,
    "LoRA on a Llama": lora,
}


class Way(NamedTuple):
    """A way of training."""

    autocast: torch.dtype | None = None
    scales: bool = False
    passes: int = 1
    checkpoints: bool = False
    wrap: str = ""

    def context(self) -> AbstractContextManager[Any]:
        on = self.autocast is not None
        return torch.autocast("cpu", self.autocast) if on else nullcontext()


WAYS: dict[str, Way] = {
    "float32": Way(),
    "autocast(bfloat16)": Way(torch.bfloat16),
    "autocast(bfloat16) and GradScaler": Way(torch.bfloat16, scales=True),
    "accumulation": Way(passes=PASSES),
    "checkpoints": Way(checkpoints=True),
    "DDP, 2 processes": Way(wrap="ddp"),
    "FSDP2, 2 processes": Way(wrap="fsdp2"),
}


def batches(is_image: bool, rank: int, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank)
    for _ in range(STEPS * passes):
        if is_image:
            x = torch.randn(B, 3, 16, 16, generator=generator)
            yield x, torch.randint(V, (B,), generator=generator)
        else:
            ids = torch.randint(V, (B, T + 1), generator=generator)
            yield ids[:, :-1], ids[:, 1:]


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "ddp":
        # Experts without a token get no gradient.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if wrap == "fsdp2":
        for part in model.modules():
            if type(part).__name__.endswith(("EncoderLayer", "DecoderLayer")):
                fully_shard(part)
        fully_shard(model)
    return model


def losses_of(
    model: nn.Module, way: Way, options: dict[str, Any] | None, is_image: bool, rank: int
) -> list[float]:
    """The loss of each pass of a run with a noise scale of these options, or without one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=way.scales, init_scale=2.0**8)
    gns: Any = None
    if options is not None:
        more = {"grad_scaler": scaler} if way.scales else {}
        gns = gnsfast.GradientNoiseScale(model, gradients="torch", **options, **more)
    drawn, losses = batches(is_image, rank, way.passes), []
    for _ in range(STEPS):
        with gns.update() if gns else nullcontext():
            for _ in range(way.passes):
                x, y = next(drawn)
                with gns.microbatch(B, scale=1 / way.passes) if gns else nullcontext():
                    losses.append(backward(model, way, scaler, x, y))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if gns and not gns.compute().updates:
        raise SystemExit("nothing was measured")
    return losses


def backward(model: nn.Module, way: Way, scaler: Any, x: Tensor, y: Tensor) -> float:
    """The loss of a pass."""
    with way.context():
        out = checkpoint(model, x, use_reentrant=False) if way.checkpoints else model(x)
        loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten())
    scaler.scale(loss / way.passes).backward()
    return loss.item()


def row_of(name: str, way: Way, rank: int = 0) -> dict[str, str]:
    """For each way to measure, how many losses are equal."""
    torch.manual_seed(0)
    first, row, is_image = MODELS[name](), {}, name.startswith("ResNet")

    def trained(options: dict[str, Any] | None) -> list[float]:
        return losses_of(wrapped(copy.deepcopy(first), way.wrap), way, options, is_image, rank)

    plain = trained(None)
    for measured, options in MEASURED.items():
        equal = sum(a == b for a, b in zip(plain, trained(options), strict=True))
        row[measured] = f"{equal} of {len(plain)}"
    return row


def enter(rank: int, port: int, folder: str) -> None:
    """All that takes two processes."""
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    pairs = product(MODELS, (way for way in WAYS.values() if way.wrap))
    torch.save([row_of(name, way, rank) for name, way in pairs], f"{folder}/{rank}")
    dist.destroy_process_group()


def tables() -> Tables:
    rows: list[dict[str, Any]] = []
    for name, (how, way) in product(MODELS, WAYS.items()):
        if not way.wrap:
            rows.append({"model": name, "training": how, **row_of(name, way)})
            print(rows[-1], flush=True)
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.start_processes(enter, (port, folder), nprocs=2, start_method="spawn")
        first, second = (torch.load(f"{folder}/{rank}") for rank in range(2))
    pairs = product(MODELS, (how for how, way in WAYS.items() if way.wrap))
    for (name, how), one, other in zip(pairs, first, second, strict=True):
        both = {
            key: one[key] if one[key] == other[key] else f"{one[key]}, {other[key]}" for key in one
        }
        rows.append({"model": name, "training": how, **both})
        print(rows[-1], flush=True)
    return {f"Losses of {STEPS} steps that equal those of plain torch to the last bit": rows}

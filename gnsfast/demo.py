# SPDX-License-Identifier: Apache-2.0
"""``python -m gnsfast.demo``: train a small GPT on real text and print every sample's gradient
norm.

The text is Python's own language reference, which every CPython carries.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast

B, T, WIDTH, HEADS, LAYERS, STEPS = 16, 64, 96, 4, 3, 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return out


class GPT(nn.Module):
    """Byte-level; the head is tied to the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(ids_BT.shape[1])[None]
        x_BTD = self.tokens(ids_BT) + self.positions(positions_1T)
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


def read_text() -> Tensor:
    """Python's language reference as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(
        bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
    ).long()


def batch_loss(model: nn.Module, batch_BT: Tensor) -> Tensor:
    logits = model(batch_BT[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch_BT[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    text = read_text()
    model = gnsfast.convert(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def draw(size: int) -> Tensor:
        starts = torch.randint(len(text) - T - 1, (size,))
        return torch.stack([text[s : s + T + 1] for s in starts])

    print(f"{len(text):,} bytes of text, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(
        "step   loss   |g_b|² of the B samples, scaled to a loss of their own: least, median, "
        "largest"
    )
    start = time.perf_counter()
    for step in range(STEPS + 1):
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            loss = batch_loss(model, draw(B))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            own = norms.total() * B**2  # the mean over B samples scaled each gradient by 1 / B
            print(
                f"{step:4}  {loss.item():5.2f}   {own.min():8.3f}  {own.median():8.3f}  "
                f"{own.max():8.3f}"
            )
    print(f"{STEPS + 1} steps in {time.perf_counter() - start:.1f} s\n")
    print("Checked against a loop over single samples:")
    print(gnsfast.verify(model, batch_loss, draw(B)))


if __name__ == "__main__":
    main()

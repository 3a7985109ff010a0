# SPDX-License-Identifier: Apache-2.0
"""A batch size that grows with the noise scale, by accumulation. Stop and resume it at any time.

python examples/batch_size.py --out run            # a checkpoint and metrics.jsonl in run/
python examples/batch_size.py --out run --resume   # continues from the checkpoint
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

import gnsfast
from gnsfast.critical_batch.control import BatchSizeController, SampleStream, cosine
from gnsfast.integrations.trackers import JSONLTracker, metrics

CONTEXT, MICROBATCH, FACTOR = 64, 8, 4.0  # CBS / noise scale: a guess, until branches measure it
LOG_EVERY, SAVE_EVERY = 10, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--stop-at", type=int, help="stop early, after so many tokens")
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))  # Python's language reference
    stream = SampleStream(text.unfold(0, CONTEXT + 1, CONTEXT))  # [samples, CONTEXT + 1]
    # It predicts each byte from the one before it.
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
    gns = gnsfast.GradientNoiseScale(model, window=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    controller = BatchSizeController(
        MICROBATCH,
        factor=FACTOR,
        tokens_per_sample=CONTEXT,
        total_tokens=options.tokens,
        max_batch_size=16 * MICROBATCH,
        calibrate=0.02,
        betas="half_life",
    )
    shape = cosine(options.tokens, warm_up=options.tokens // 50, final=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, controller.lr_lambda(shape))
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "controller": controller,
        "stream": stream,
        "gns": gns,
    }
    step, checkpoint = 0, options.out / "checkpoint.pt"
    if options.resume:
        state = torch.load(checkpoint)
        step = state.pop("step")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        print(f"resumed at {controller.tokens:,} tokens with a batch of {controller.batch_size}")
    tracker = JSONLTracker(options.out / "metrics.jsonl")

    end = min(options.tokens, options.stop_at or options.tokens)
    while controller.tokens < end:
        step, share, total = step + 1, 1 / controller.accumulation, 0.0
        trained = controller.tokens + controller.batch_tokens
        with gns.update():
            for _ in range(controller.accumulation):
                batch = stream.draw(MICROBATCH)
                with gns.microbatch(MICROBATCH, scale=share):
                    logits = model(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                    (loss * share).backward()
                total += loss.item() * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decision = controller.update(trained, gns.compute)  # computed only when a check is due
        scheduler.step()  # after the controller, whose tokens and learning-rate factor it reads
        if decision is not None:
            controller.apply(decision, optimizer)  # betas; the learning rate is the scheduler's
            tracker.record(decision.record())
            print(f"{decision.tokens:>9,} tokens: {decision.reason}")
        if step % LOG_EVERY == 0 or trained >= end:
            [lr] = scheduler.get_last_lr()
            found = metrics(gns.compute(), tokens=trained) | controller.metrics()
            tracker.log({"loss": total, "lr": lr, **found}, step)
        if step % SAVE_EVERY == 0 or trained >= end:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **states}, partial := checkpoint.with_suffix(".partial"))
            partial.replace(checkpoint)  # in one step: a kill leaves the old file or the new one
    tracker.close()
    print(f"{step} steps, the last of {controller.batch_size} samples\n{gns.compute()}")


if __name__ == "__main__":
    main()

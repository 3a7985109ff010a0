# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/rules.md`` from the tables in the code: ``python docs/rules.py``."""

from pathlib import Path

from gnsfast.critical_batch import RULES, laws

PAGE = Path(__file__).with_suffix(".md")

TEXT = """# Rules and laws

`python docs/rules.py` writes this page from `gnsfast/critical_batch/rules.py` and
`gnsfast/critical_batch/laws.py`; a test compares them.

## How hyperparameters follow a batch that grows by k

η is the learning rate, λ the weight decay, β1, β2 and ε are Adam's. In your own loop, call
`Rules(lr=..., betas=..., weight_decay=...).apply(optimizer, k)`. Growing by 2 and then by 3 equals
growing by 6.

{rules}

The learning rate of an optimizer for which no rule is known, such as Muon or Lion, is refused by
name: pass `lr="none"` and move it yourself, or `lr="keep"`. β2 has a floor, because `0.95^16 = 0.44`
would lie below β1. Where a batch both grows and shrinks, a run that would meet the floor is refused:
the way back would not lead to the old β2.

The rules hold where gradients are mostly noise. Beyond the critical batch size none of them holds,
and a larger learning rate may only make training unstable.

## Published laws of batch sizes

`gnsfast plan` prints those whose argument it knows. D is tokens, N parameters without embeddings, C
= 6 N D FLOPs, L the loss. They disagree by multiples, and do not all predict the same quantity.

{laws}
"""

FITTED = {
    "tokens": lambda x: f"{x / 1e9:g}B tokens",
    "parameters": lambda x: f"{x / 1e6:g}M parameters",
    "FLOPs": lambda x: f"{x:g} FLOPs",
    "loss": lambda x: f"a loss of {x:g}",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell or '-' for cell in line)} |" for line in lines)


def rules() -> str:
    head = ("argument", "with k times the batch", "paper", "range", "a test reproduces")
    rows = [(f'`{r.moves}="{r.name}"`', r.formula, r.source, r.holds, r.tested) for r in RULES]
    return table(head, rows)


def law_rows() -> list[tuple[str, ...]]:
    found = []
    for law in (*laws.LAWS, laws.LING_EXPERTS, laws.ZHANG_FIXED_DATA):
        known = law.fitted and " to ".join(FITTED[law.argument](x) for x in law.fitted)
        found.append((law.name, law.quantity, law.formula, law.source, known or "", law.note))
    for through in (laws.power_lines_optimal, laws.power_lines_critical):
        law = through(1e9, 1e6)
        formula = law.formula.replace("1.00M", "B0").replace("1M", "B0").replace("1B", "D0")
        found.append((law.name, law.quantity, formula, law.source, "that of your measurement", ""))
    timescale = "τ = B / (η λ D) = 1.084 (D / N)^-0.527"
    paper = "Bergsma et al. 2025 (arXiv 2505.13738)"
    found.append(("Power Lines, timescale", "AdamW's weight decay", timescale, paper, "", ""))
    return found


def page() -> str:
    head = ("law", "predicts", "equation", "paper", "fitted", "note")
    return TEXT.format(rules=rules(), laws=table(head, law_rows()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/llms.txt``, the list of all pages for agents: ``python docs/llms.py``."""

import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "llms.txt"

TEXT = """# gnsfast

> Measures the gradient noise scale and every sample's gradient norm inside the backward passes of a
> PyTorch training loop, and the critical batch size with branches of the run. Python 3.10 or newer,
> torch 2.11 or newer. Install: `pip install '.[cli]'` in a checkout.

Three lines in a loop; the model stays as it is:

```python
import torch, gnsfast

model = torch.nn.Linear(32, 8)
loader = [(torch.randn(16, 32), torch.randint(0, 8, (16,))) for _ in range(20)]
gns = gnsfast.GradientNoiseScale(model)  # 1
for x, y in loader:
    with gns.update(len(x)):  # 2: the number of samples; a sequence is one sample
        torch.nn.functional.cross_entropy(model(x), y).backward()
print(gns.compute())  # 3: in samples, with a 95 % interval
```

Check them with `gnsfast.verify` as [the page for agents](how-to/agents.md) says. It also lists the
commands with `--json`: `gnsfast doctor`, `plan`, `schedule`, `branch`, `report`.

`python docs/llms.py` writes this file. In the built site `.md` is `.html`.
"""


def pages() -> dict[str, list[str]]:
    """The pages of each section of the navigation; those outside of one are in "Start"."""
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    section = ""
    for line in text[text.index("\nnav:") :].splitlines():
        if head := re.fullmatch(r"  - ([\w -]+):", line):
            section = head[1]
        elif page := re.fullmatch(r"( +)- (?:[^:]+: )?([\w/-]+\.md)", line):
            found.setdefault(section if len(page[1]) > 2 else "Start", []).append(
                page[2]
            )
    return found


def entry(page: str) -> str:
    """A page's link, and its first sentence where it has one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    body = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.S)
    title = re.search(r"^# (.+)$", body, re.M)
    assert title is not None, f"docs/{page} has no title"
    paragraphs = re.split(r"\n\s*\n", body[title.end() :].strip())
    first = next((p for p in paragraphs if re.match(r"(?!\d+\.)[\w`*\[]", p)), "")
    words = re.sub(
        r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split())
    ).replace("**", "")
    sentence = re.split(r"(?<=[.:?!])\s(?=[\"A-Z`])", words)[0].rstrip(":.")
    return f"- [{title[1]}]({page})" + (f": {sentence}." if sentence else "")


def text() -> str:
    sections = [
        f"## {name}\n\n" + "\n".join(map(entry, listed)) + "\n"
        for name, listed in pages().items()
    ]
    return "\n".join([TEXT, *sections])


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""``docs/rules.md`` is what the tables in the code say."""

import runpy
from pathlib import Path

from gnsfast.critical_batch import RULES, laws

DOCS = Path(__file__).parents[2] / "docs"


def test_page_is_the_tables() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert text == runpy.run_path(str(DOCS / "rules.py"))["page"](), "run python docs/rules.py"
    published = {law.name for law in vars(laws).values() if isinstance(law, laws.Law)}
    assert all(f"| {name} |" in text for name in published)
    assert all(f'`{rule.moves}="{rule.name}"`' in text for rule in RULES)

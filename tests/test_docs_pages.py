# SPDX-License-Identifier: Apache-2.0
"""The pages of ``docs/``: their code runs, their links and anchors exist, their commands too.

A page is one program: its Python blocks run in turn, with the names of those before. A block after
a comment ``<!-- compiled only: why -->`` is compiled and not run. So are the recipes, which run
beside their frameworks (``make clients``).
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
BLOCK = re.compile(
    r"(?m)^(?:<!-- compiled only: (?P<why>.+) -->\n)?"
    r"```(?P<language>\w*).*\n(?P<code>(?:.*\n)*?)```$"
)
COMMAND = re.compile(r"gnsfast( [a-z]+)?( .*)?")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def code(page: Path, *languages: str) -> list[re.Match[str]]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block for block in found if block["language"] in languages]


def anchors(page: Path) -> set[str]:
    """Those that MkDocs makes of headings, and those of the reference's names."""
    text = prose(page)
    slugs = {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading, flags=re.A).strip().lower())
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }
    return slugs | set(re.findall(r"(?m)^::: ([\w.]+)$", text))


@pytest.mark.second
@pytest.mark.parametrize("name", [name for name in NAMES if code(DOCS / name, "python")])
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    for block in code(DOCS / name, "python"):
        program = compile(block["code"], f"docs/{name}", "exec")
        if not block["why"] and not name.startswith("recipes/"):
            exec(program, scope)


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str) -> None:
    page = DOCS / name
    text = prose(page)
    assert text.startswith("# ") or "\n# " in text
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        file, _, anchor = target.partition("#")
        to = (page.parent / file).resolve() if file else page
        assert to.exists() and DOCS in to.parents, target
        if anchor not in {"", "only-light", "only-dark"}:
            assert anchor in anchors(to), target
    for included in re.findall(r'--8<-- "([^":]+)', page.read_text(encoding="utf-8")):
        assert (ROOT / included).exists(), included


def test_ratios_are_those_of_the_records() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    names = set(re.findall(r"record `([\w-]+)`", text))
    records = "".join((RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in names)
    ratios = re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", text)
    assert len(ratios) > 10
    assert not [ratio for ratio in ratios if ratio not in records]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == set(NAMES)


def test_llms_txt_is_not_stale() -> None:
    """Every page with its title and first sentence; its links resolve and its code runs."""
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text == runpy.run_path(str(DOCS / "llms.py"))["text"](), "run python docs/llms.py"
    assert text.startswith("# gnsfast\n\n> ")  # as llmstxt.org has it
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert set(links) == set(NAMES) and all((DOCS / link).is_file() for link in links)
    blocks = code(DOCS / "llms.txt", "python")
    assert blocks
    for block in blocks:
        exec(block["code"], {})


def test_commands_and_their_options_exist() -> None:
    typer = pytest.importorskip("typer")
    from gnsfast.cli.app import app

    commands = typer.main.get_command(app).commands
    lines = [
        line
        for page in PAGES
        for block in code(page, "bash", "console")
        for line in block["code"].replace("\\\n", " ").splitlines()
    ]
    found = [match for line in lines if (match := COMMAND.match(line.strip()))]
    assert found
    for match in found:
        if match[1] is None:
            continue
        command = commands[match[1].strip()]
        parts = getattr(command, "commands", {"": command}).values()
        options = {
            o for part in parts for each in part.params for o in (*each.opts, *each.secondary_opts)
        }
        arguments = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", match[2] or "")
        used = set(re.findall(r"(?<= )--[a-z-]+", arguments))
        assert used <= {*options, "--help"}, match[0]
    assert {match[1].strip() for match in found if match[1]} == set(commands)

# SPDX-License-Identifier: Apache-2.0
"""What the README and the house promise."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gnsfast

ROOT = Path(__file__).parent.parent
WORDS = ("/" + "work/", "/" + "root/", "bash" + "_jobs")


def python(code: str, cwd: Path) -> str:
    """Standard output of a fresh interpreter."""
    run = [sys.executable, "-c", code]
    return subprocess.run(run, cwd=cwd, capture_output=True, text=True, check=True).stdout


IMPORT = """
import gc, json, sys, torch
from time import process_time as now
# Bytecode at hand, as installed packages have it, whatever the environment says.
sys.dont_write_bytecode, sys.pycache_prefix = False, "bytecode"
gc.disable()  # a collection takes 0.1 s for torch's objects, wherever it falls
before, start = set(sys.modules), now()
import gnsfast
print(json.dumps({"seconds": now() - start, "modules": [*set(sys.modules) - before]}))
"""


@pytest.mark.second
def test_import_takes_no_time_and_pulls_in_torch_alone(tmp_path: Path) -> None:
    """The first import writes the bytecode, and other programs only add to a time."""
    for _ in range(5):
        found = json.loads(python(IMPORT, tmp_path))
        if found["seconds"] < 0.1:
            break
    assert found["seconds"] < 0.1
    added = {name.partition(".")[0] for name in found["modules"]} - set(sys.stdlib_module_names)
    assert added - {"torch"} == {"gnsfast"}
    assert "gnsfast._C" not in found["modules"], "importing starts no back-end"


def test_folder_of_kernels_keeps_its_bare_name_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("gnsfast.triton_kernels")
    assert kernels.__name__ == "gnsfast.triton_kernels"
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=r"import gnsfast\.triton_kernels"):
        importlib.import_module("triton_kernels")


def test_every_folder_is_packaged() -> None:
    """A wheel lacks what ``pyproject.toml`` does not name; the checkout has it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'^    "(gnsfast[\w.]*)",$', text, re.MULTILINE)
    folders = {path.parent.relative_to(ROOT) for path in tracked("gnsfast/*.py")}
    assert {*named} == {".".join(path.parts) for path in folders} | {"gnsfast.triton_kernels"}


def test_version() -> None:
    assert importlib.metadata.version("gnsfast") == gnsfast.__version__
    assert f"\nversion: {gnsfast.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {gnsfast.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_wheel_is_what_is_tested_there() -> None:
    """``make wheel-test`` must not read the checkout."""
    inside = ROOT in Path(gnsfast.__file__).parents
    in_build = ROOT / "build" in Path(gnsfast.__file__).parents
    assert inside and in_build == ("GNSFAST_TEST_WHEEL" in os.environ)


@pytest.mark.skipif("GNSFAST_TEST_WHEEL" not in os.environ, reason="the checkout has all modules")
def test_every_module_is_in_the_wheel() -> None:
    """A folder that ``pyproject.toml`` does not name is missing there alone."""
    sources = [path.relative_to(ROOT) for path in (ROOT / "gnsfast").rglob("*.py")]
    sources += ["gnsfast" / path.relative_to(ROOT) for path in ROOT.glob("triton_kernels/*.py")]
    sources += [path.relative_to(ROOT) for path in (ROOT / "gnsfast").rglob("templates/*")]
    installed = Path(gnsfast.__file__).parents[1]
    assert len(sources) > 100
    assert not [path for path in sources if not (installed / path).exists()]


def tracked(*patterns: str) -> list[Path]:
    run = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).exists()]


def test_files_speak_of_the_project() -> None:
    files = tracked()
    assert len(files) > 30
    for path in files:
        if path.suffix == ".png":
            continue
        text = path.read_text(encoding="utf-8")
        assert not [w for w in WORDS if w in text], path
        if path.suffix in (".py", ".cu", ".cuh", ".cpp"):
            assert "SPDX-License-Identifier: Apache-2.0" in text.partition("\n")[0], path


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 100
    assert any(line.startswith("```python") for line in lines[:10])

# SPDX-License-Identifier: Apache-2.0
"""What ``make proof`` last noted holds for today's files and compilers."""

import json
from pathlib import Path
from types import SimpleNamespace

import proofs
import pytest

pytestmark = pytest.mark.source


@pytest.mark.parametrize("name", proofs.PROOFS)
def test_proof_holds(name: str) -> None:
    """Otherwise the kernels have changed, and the tests that take minutes have not run since."""
    assert not (why := proofs.stale(name)), why


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A project with one kernel and one compiler, proven."""
    compiler = SimpleNamespace(version="cc 1", source=tmp_path / "kernel.c")
    compiler.source.write_text("right")
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "NOTE", tmp_path / "proven.json")
    monkeypatch.setattr(proofs, "PROOFS", {"one": (("*.c",), lambda: compiler.version)})
    prove()
    return compiler


def prove() -> None:
    proofs.NOTE.write_text(json.dumps(proofs.note()))


def test_changed_file(one: SimpleNamespace) -> None:
    assert proofs.stale("one") == ""
    one.source.write_text("wrong")
    assert "one: its files have changed" in proofs.stale("one")
    prove()
    assert proofs.stale("one") == ""


def test_new_file(one: SimpleNamespace) -> None:
    one.source.with_name("another.c").write_text("right")
    assert "its files have changed" in proofs.stale("one")


def test_other_compiler(one: SimpleNamespace) -> None:
    """It proves the same files beside the first, and changed files alone."""
    one.version = "cc 2"
    assert proofs.stale("one") == "one: not proven with cc 2: run make proof"
    prove()
    assert proofs.proven()["one"]["compilers"] == ["cc 1", "cc 2"]
    one.source.write_text("changed")
    prove()
    assert proofs.proven()["one"]["compilers"] == ["cc 2"]


def test_without_a_compiler(one: SimpleNamespace) -> None:
    """Nothing is proven, and nothing is said to be."""
    before, one.version = proofs.proven(), ""
    one.source.write_text("changed")
    assert proofs.stale("one") == "" and proofs.note() == before


def test_pattern_without_a_file(one: SimpleNamespace) -> None:
    one.source.unlink()
    with pytest.raises(FileNotFoundError, match="correct tests/proofs.py"):
        proofs.stale("one")

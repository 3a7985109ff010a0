# SPDX-License-Identifier: Apache-2.0
"""Examples that users copy must run: every docstring, and the README's code."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import gnsfast

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.walk_packages(gnsfast.__path__, "gnsfast.")]


@pytest.mark.second
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # of a trainer that only make clients installs
        if ": pip install" not in str(error):
            raise
        pytest.skip(str(error))
    names = {"gnsfast": gnsfast, "torch": torch}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_name_has_an_example() -> None:
    public = [getattr(gnsfast, n) for n in gnsfast.__all__ if n[0].islower() and n != "functional"]
    functions = [getattr(gnsfast.functional, n) for n in gnsfast.functional.__all__]
    assert all(">>> " in (f.__doc__ or "") for f in [*public, *functions] if callable(f))


def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)

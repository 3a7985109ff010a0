# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again and again to no end: more than half of its
time.
"""

import dataclasses
from typing import Any


def spare_work() -> None:
    from triton.runtime import interpreter

    # It repeats each integer sum in int64, for asserts that its debug=False turns off.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # At each call of a function it searches the language for what the launch has replaced in it
    # already. Only Triton's own functions know it by another name, and what that call replaces is
    # never put back: once is enough.
    searched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in searched:
            searched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    # It makes a table of all types to look up one.
    known: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = look_up(of)
        return known[name]

    interpreter._get_np_dtype = dtype

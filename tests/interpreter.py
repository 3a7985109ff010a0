# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again and again to no end: more than half of its
time.
"""

import dataclasses
from typing import Any


def spare_work() -> None:
    from triton.language import core
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

    # Each result has a type of its own, for which it checks, names and wraps the same sizes.
    made: dict[Any, dict[str, Any]] = {}
    make = core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in made or element_ty.is_ptr():  # pointers of one name may differ
            make(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            self.of_tensors = sizes, core.constexpr(self.numel)
            made[key] = vars(self)
        else:
            vars(self).update(made[key])

    of_scalars = core.tuple([]), core.constexpr(1)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor

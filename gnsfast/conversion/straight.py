# SPDX-License-Identifier: Apache-2.0
"""Which forwards are a straight line of operators, so that a trial on random input says what they
do of any other. The methods of a module that its forward calls (``self._norm(x)``) must be such
lines too. Branches that a module's settings decide (``if self._fast_norm:``) are taken out first:
the layer is then the kernel's as long as the settings stay.
"""

import ast
import copy
import dis
import functools
import inspect
import types
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnsfast.layers import EPS, Setting

OWN = {
    *("weight", "bias", *EPS, "normalized_shape", "num_groups"),
    *("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
}
"""What a straight forward may read of its module."""

NAMES = OWN | {
    *("F", "nn", "torch", "functional", "linear", "layer_norm", "rms_norm", "group_norm"),
    *("embedding", "matmul", "shape", "dtype", "to", "type_as", "float", "float32"),
    *("T", "mT", "t", "permute", "transpose", "contiguous"),
    *("pow", "square", "mean", "rsqrt", "sqrt"),
}
"""What a straight forward may name."""

BRANCHES = (
    *("JUMP", "FOR_", "STORE_ATTR", "STORE_GLOBAL", "SUBSCR", "SLICE", "IMPORT", "YIELD", "WITH"),
    *("UNPACK", "SETUP_", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "UNARY_NOT", "TO_BOOL"),
    *("FLOOR_DIVIDE", "MODULO", "SHIFT", "XOR", "BINARY_AND", "BINARY_OR"),  # of Python 3.10
    *("INPLACE_AND", "INPLACE_OR"),
)
"""Parts of the instructions that a straight forward has not. A comparison of tensors is a branch
too: ``(x > 1e9) * x`` is zero in a trial.
"""

CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""What a straight forward may take from torch by a global name. A tensor or a dtype may change."""

MISSING = object()

SMOOTH = {"+", "-", "*", "/", "**", "@"}
"""The operators between tensors that are none."""

DTYPES = {"float16", "bfloat16", "float32", "float64"}
"""The dtypes of weights that trials try."""

PLAIN = (bool, int, float, str, type(None))
"""The types of settings."""


class Part(NamedTuple):
    """A forward, or a method that it calls, and its code without the branches that it does not
    take. Code that is not known is None.
    """

    function: Any
    code: types.CodeType | None


class Forward(NamedTuple):
    """The forward of a module and its own methods that it calls, by name, and what must stay as it
    is: the settings that decide their branches, the attributes that they may read, the methods.
    ``without_autocast`` says whether a part turns autocast off.
    """

    parts: dict[str, Part]
    settings: tuple[Setting, ...] = ()
    without_autocast: bool = False


def forward_of(module: nn.Module, cls: type[nn.Module]) -> Forward:
    """The forward of a ``module`` of class ``cls``. Its branches stay where its source is not
    known, or is not that of its code.
    """
    if not _has_plain_attributes(cls):
        return Forward({"forward": Part(cls.forward, None)})
    parts: dict[str, Part] = {}
    settings = _read_later(module)
    left, casts = ["forward"], False
    while left:
        name = left.pop()
        parts[name], without = _decided(module, getattr(cls, name), settings)
        casts |= without
        code = parts[name].code
        read = set() if code is None else {*_reads(code)}
        methods = [n for n in read if n and n not in parts and _is_method(module, cls, n)]
        settings |= {(n, None): Setting(n, None, getattr(cls, n)) for n in methods}
        left += methods
    return Forward(parts, tuple(settings.values()), casts)


def _read_later(module: nn.Module) -> dict[tuple[str, Any], Setting]:
    """The attributes that a forward or a kernel may read in each call, apart from parameters."""
    own = OWN - {name for name, p in module._parameters.items() if p is not None}
    found = {name: inspect.getattr_static(module, name, MISSING) for name in own}
    found |= {name: None for name in own & module._parameters.keys()}
    return {
        (name, None): Setting(name, None, value)
        for name, value in found.items()
        if value is not MISSING
    }


def _decided(
    module: nn.Module, function: Any, settings: dict[tuple[str, Any], Setting]
) -> tuple[Part, bool]:
    """``function`` without the branches that settings decide, which are put into ``settings``, and
    whether it turns autocast off.
    """
    code = getattr(function, "__code__", None)
    if code is None or (tree := _source(code)) is None:
        return Part(function, code), False
    decide = _Decide(module, code.co_varnames[:1], function.__globals__)
    of_module = ast.Module([decide.visit(copy.deepcopy(tree))], [])
    try:
        made = compile(ast.fix_missing_locations(of_module), "<forward>", "exec")
    except (SyntaxError, ValueError):  # a name of an outer function, or a block that is left empty
        return Part(function, code), False
    settings |= decide.settings
    return Part(function, next(_codes(made))), decide.without_autocast


def _has_plain_attributes(cls: type[nn.Module]) -> bool:
    """Whether a class finds its attributes as any module does, and no property is among them that a
    forward may read.
    """
    usual = cls.__getattribute__ is object.__getattribute__
    found = (inspect.getattr_static(cls, name, None) for name in OWN)
    return (
        usual
        and cls.__getattr__ is nn.Module.__getattr__
        and not any(hasattr(each, "__get__") for each in found)
    )


def _is_method(module: nn.Module, cls: type, name: str) -> bool:
    """Whether a module's attribute is a function of its class, and no name of torch's."""
    found = inspect.getattr_static(cls, name, None)
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    torchs = any(hasattr(home, name) for home in (Tensor, F, torch))
    function = isinstance(found, types.FunctionType) and found.__name__ == name
    return function and name not in own and not torchs


@functools.cache
def _source(code: types.CodeType) -> ast.FunctionDef | None:
    """What ``code`` was made of; None if that is not known, as of a file that has changed."""
    try:
        text = "".join(inspect.findsource(code)[0])
        tree = ast.parse(text)
        made = compile(text, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError):
        return None
    start = code.co_firstlineno  # of a decorated function it is the decorator's
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno == start]
    return found[0] if len(found) == 1 and code in _codes(made) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """All code inside of ``code``."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def is_straight(forward: Forward) -> bool:
    """Whether all code of a forward is a line of torch's operators on its input, its weight and its
    bias: without branches, arguments or attributes that could change what it does of other inputs,
    or later. It may only ask whether there is a bias, and of which dtype the weight is, since
    trials try each dtype.
    """
    methods = forward.parts.keys() - {"forward"}
    values = [s.value for s in forward.settings if s.kind is None and s.name in OWN]
    if not all(isinstance(v, PLAIN) for value in values for v in _each(value)):
        return False  # a tensor, which may change unseen
    return all(_is_line(part, methods) for part in forward.parts.values())


def _is_line(part: Part, methods: Set[str]) -> bool:
    function, code = part
    if code is None or len(inspect.signature(function).parameters) != 2:
        return False
    if code.co_freevars or function.__defaults__ or getattr(code, "co_exceptiontable", b""):
        return False
    steps = list(dis.get_instructions(code))
    if not all(_is_torch(function, s.argval) for s in steps if s.opname == "LOAD_GLOBAL"):
        return False
    if any(isinstance(each, types.CodeType) for each in code.co_consts):
        return False  # a function within it may hold anything
    if not {*_reads(code)} <= OWN | methods:
        return False
    return {*code.co_names} <= NAMES | methods and not any(map(_may_branch, steps))


def _may_branch(step: dis.Instruction) -> bool:
    if step.opname == "BINARY_OP":
        return step.argrepr.removesuffix("=") not in SMOOTH
    if "NONE" in step.opname or step.opname == "JUMP_FORWARD":  # whether there is a bias
        return False
    return any(each in step.opname for each in BRANCHES)


def _reads(code: types.CodeType) -> Iterator[str]:
    """The attributes that code reads of its module, and "" for anything else that it does with it.
    ``x.T`` is a matrix, and ``self.T`` could be a temperature.
    """
    own, steps = code.co_varnames[:1], list(dis.get_instructions(code))
    for step, following in zip(steps, steps[1:]):
        if "_FAST" not in step.opname:
            continue
        used = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if not {*own} & {*used}:
            continue
        loads = step.opname.rpartition("_FAST")[0].endswith("LOAD")
        read = loads and own == used[-1:] and used.count(*own) == 1
        named = following.opname in ("LOAD_ATTR", "LOAD_METHOD")
        yield following.argval if read and named else ""


def _is_torch(function: Any, name: str) -> bool:
    found = function.__globals__.get(name)
    if not isinstance(found, CODE):
        return False
    home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None)
    return f"{home}.".startswith("torch.")


def _returns(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Return) for each in ast.walk(node))


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _Undecided(Exception):
    """A test that more than a module's settings decides."""


class _Decide(ast.NodeTransformer):
    """Takes the branches that the settings of a module decide."""

    def __init__(self, module: nn.Module, own: tuple[str, ...], names: dict[str, Any]) -> None:
        self.module, self.own, self.names = module, own, names
        self.settings: dict[tuple[str, Any], Setting] = {}
        self.without_autocast = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        ends = [i for i, each in enumerate(node.body) if isinstance(each, ast.Return)]
        node.body = node.body[: ends[0] + 1 if ends else None] or [ast.Pass()]
        return node

    def visit_With(self, node: ast.With) -> Any:
        """Autocast that is switched off for the device of a tensor."""
        match node.items:
            case [ast.withitem(ast.Call(ast.Attribute(ast.Name("torch"), "autocast"), [], named))]:
                values = {n.arg: n.value for n in named}
                off = values.keys() == {"enabled", "device_type"}
                off = off and ast.unparse(values["device_type"]).endswith(".device.type")
                if off and isinstance(enabled := values["enabled"], ast.Constant):
                    if enabled.value is False and node.items[0].optional_vars is None:
                        self.without_autocast = True
                        return self._block(node.body)
        return self.generic_visit(node)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found = [self.visit(each) for each in body]
        return [s for each in found for s in (each if isinstance(each, list) else [each])]

    def visit_If(self, node: ast.If) -> Any:
        if self._is_of_dtype(node.test) and not _returns(node):
            return self._block(node.body + node.orelse)  # trials take both sides
        if (taken := self._taken(node.test)) is None:
            return self.generic_visit(node)
        return self._block(node.body if taken else node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if (taken := self._taken(node.test)) is None:
            return self.generic_visit(node)
        return self.visit(node.body if taken else node.orelse)

    def _is_of_dtype(self, test: ast.expr) -> bool:
        """Whether a test compares the dtype of the weight with dtypes of torch."""
        match test:
            case ast.Compare(
                ast.Attribute(ast.Attribute(ast.Name(name), "weight"), "dtype"), _, of
            ):
                sides = [e for c in of for e in getattr(c, "elts", [c])]
                named = {ast.unparse(each).removeprefix("torch.") for each in sides}
                return (name,) == self.own and named <= DTYPES
        return False

    def _taken(self, test: ast.expr) -> bool | None:
        before = dict(self.settings)
        try:
            value = self._value(test)
            if isinstance(value, Tensor):
                raise _Undecided
            return bool(value)
        except _Undecided:
            self.settings = before
            return None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Attribute(ast.Name(name), key) if (name,) == self.own:
                return self._attribute(key)
            case ast.UnaryOp(ast.Not(), operand):
                return not self._truth(operand)
            case ast.BoolOp(op, values):
                kind = any if isinstance(op, ast.Or) else all
                return kind(self._truth(each) for each in values)
            case ast.Compare(left, [ast.Is() | ast.IsNot() as op], [ast.Constant(None)]):
                return (self._value(left) is None) == isinstance(op, ast.Is)
            case ast.Compare(left, [ast.Eq() | ast.NotEq() as op], [right]):
                a, b = self._plain(left), self._plain(right)
                return (a == b) == isinstance(op, ast.Eq)
            case ast.Call(ast.Name("isinstance"), [ast.Attribute() as of, kind], []):
                return self._is_instance(of, kind)
            case ast.Call(func, [], []) if ast.unparse(func) == "torch.jit.is_scripting":
                return False
        raise _Undecided

    def _truth(self, node: ast.expr) -> bool:
        return bool(self._plain(node))

    def _plain(self, node: ast.expr) -> Any:
        value = self._value(node)
        if isinstance(value, Tensor):
            raise _Undecided
        return value

    def _attribute(self, key: str) -> Any:
        if (p := self.module._parameters.get(key)) is not None:
            return p
        if key in self.module._parameters:
            self.settings[key, None] = Setting(key, None, None)
            return None
        value = inspect.getattr_static(self.module, key, self)
        if key == "training" or not all(isinstance(v, PLAIN) for v in _each(value)):
            raise _Undecided
        self.settings[key, None] = Setting(key, None, value)
        return value

    def _is_instance(self, of: ast.Attribute, kind: ast.expr) -> bool:
        value = self._value(of)
        cls = self.names.get(kind.id) if isinstance(kind, ast.Name) else None
        if not isinstance(value, Tensor) or not isinstance(cls, type):
            raise _Undecided
        verdict = isinstance(value, cls)
        self.settings[of.attr, cls] = Setting(of.attr, cls, verdict)
        return verdict

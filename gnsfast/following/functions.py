# SPDX-License-Identifier: Apache-2.0
"""The functions of torch by what they do with a parameter, and a call of one of them."""

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from gnsfast.following.leaf import compiling, expression_of
from gnsfast.tensors import writes
from gnsfast.torch_internals import pytree, unfollowed

KEEPS = frozenset(
    "t transpose permute view reshape flatten unflatten squeeze unsqueeze contiguous clone to "
    "float double half bfloat16 type type_as movedim swapaxes swapdims view_as reshape_as T mT "
    "ravel adjoint H mH".split()
)
"""Functions whose result holds each element of their argument once."""

SHIFTS = frozenset("__neg__ neg __add__ __radd__ __sub__ __rsub__ add sub rsub".split())
"""Functions whose result has the parameter's gradient, or its negative, if shapes stay and none of
them is scaled by ``alpha``. (Torch calls ``1 + w`` an ``add``.)
"""

PIECES = frozenset(
    "narrow select chunk split unbind tensor_split split_with_sizes __iter__ __getitem__".split()
)
"""Functions whose results hold each element of their argument at most once."""

ELEMENTWISE = frozenset(
    f"__{kind}{name}__"
    for name in ("add", "sub", "mul", "truediv", "pow")
    for kind in ("", "r", "i")
) | frozenset(
    "add sub mul div pow lerp addcmul addcdiv maximum minimum where multiply subtract divide "
    "true_divide rsub add_ sub_ mul_ div_ copy_ masked_fill masked_fill_ expand expand_as repeat "
    "broadcast_to broadcast_tensors".split()
)
"""Functions that broadcast their arguments against each other, or to a shape."""

IN_PLACE = frozenset(filter(writes, ELEMENTWISE))
"""Those of them that write to their first argument. (Dynamo can only look a name up.)"""

QUERIES = frozenset(
    "__get__ __set__ __delete__ size dim numel nelement __len__ ndimension is_floating_point "
    "is_complex is_contiguous "
    "element_size get_device stride detach requires_grad_ register_hook data_ptr storage_offset "
    "__repr__ __format__ is_shared untyped_storage zero_ __hash__ new_zeros new_ones new_empty "
    "register_post_accumulate_grad_hook new_full new_tensor zeros_like ones_like empty_like type_ "
    "is_same_size item tolist __bool__".split()
)
"""Functions that give no gradient to a parameter."""

COMPILED = KEEPS | SHIFTS | PIECES | {"embedding"}
"""Functions of parameters alone that compiled code follows."""

LOOKUPS = frozenset("__getitem__ index_select embedding".split())
"""Functions that look up rows of a table at ids."""

CASTS = frozenset(("to", "type_as"))
COPIES = frozenset("expand expand_as repeat broadcast_to".split())
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())
RANDOM = frozenset(
    "dropout dropout_ alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d "
    "dropout3d bernoulli rand_like randn_like normal gumbel_softmax rrelu multinomial".split()
)
"""Functions that draw random numbers."""

_views = {getattr(Tensor, name).__get__: name for name in ("T", "mT", "real", "imag")}
_views |= {getattr(Tensor, name).__get__: "adjoint" for name in ("H", "mH")}
PRODUCTS = torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__
NAMES: dict[Any, str] = {**_views, **dict.fromkeys(PRODUCTS, "matmul")}


def name_of(func: Any) -> str:
    """The name of a function of torch in the steps of an example."""
    name: str = NAMES.get(func) or func.__name__
    return name


_OWN = {name: f for name, f in vars(F).items() if isinstance(f, types.FunctionType)}


def of_torch(func: Any) -> Any:
    """The function of ``torch.nn.functional`` in whose place somebody has put ``func``, which calls
    it: torch says by this name what it calls itself. Any other function as it is.
    """
    if type(func) is not types.FunctionType or _OWN.get(func.__name__) is func:
        return func
    if func.__module__.startswith("torch.") and vars(F).get(func.__name__) is not func:
        return func  # such as torch.einsum
    name = next((name for name, f in vars(F).items() if f is func), "")
    return _OWN.get(name, func)


_NO_SUBCLASS = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)


def _opened(f: Any) -> Any:
    """A function of ``torch.nn.functional`` that does not ask for a tensor subclass first."""
    names = {**f.__globals__, **_NO_SUBCLASS}
    opened = types.FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)
    opened.__kwdefaults__ = f.__kwdefaults__
    return opened


_attend = _opened(F.multi_head_attention_forward)
_ASKED = {*_attend.__code__.co_names} - {*_NO_SUBCLASS}
"""The names that attention looks up."""


def renew_attention() -> None:
    """Let attention see the functions that others have put into ``torch.nn.functional``."""
    functions = vars(F)
    _attend.__globals__.update((name, functions[name]) for name in _ASKED if name in functions)


def _attention(*args: Any, **kwargs: Any) -> Any:
    if not compiling():
        renew_attention()
    return _attend(*args, **kwargs)


def _plain(f: Any) -> Any:
    """A function whose own functions are not seen."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with unfollowed():
            return f(*args, **kwargs)

    return run


_INITIALS = init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_
"""Those of ``torch.nn.init`` that ask a tensor subclass. They give no gradient."""

OPENED: dict[Any, Any] = {
    **{f: _plain(f) for f in _INITIALS},
    F.multi_head_attention_forward: _attention,
    **{f: _opened(f) for f in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)},
}
"""Functions of torch whose own functions are seen one by one. (Inside of ``unfollowed`` a backward
pass could not unpack the tensors of a checkpoint.)
"""


def _set_item(x: Tensor, index: Any, value: Any) -> Tensor:
    """``x[index] = value``"""
    x[index] = value
    return x


class Flattened(NamedTuple):
    """A function of the leaves of its arguments, which ``spec`` puts together. That is None where
    each argument is a leaf: pytree takes 10 µs to flatten a few.
    """

    func: Any
    spec: Any

    def __call__(self, leaves: list[Any]) -> Any:
        if self.spec is None:
            return self.func(*leaves)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)


class Call:
    """A call of a ``function`` without a kernel, of ``leaves``: its arguments, flattened. At the
    places ``own`` are parameters, or tensors made of them, which need a gradient.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.name, self._given = name_of(func), (args, kwargs)
        if kwargs or any(isinstance(t, (tuple, list, dict)) for t in args):
            self.leaves, spec = pytree.tree_flatten((args, kwargs))
        else:
            self.leaves, spec = [*args], None
        self.function = Flattened(_set_item if self.name == "__setitem__" else func, spec)
        self.constants = self.leaves
        self.parameters_at, self.expressions = [], []
        for i, t in enumerate(self.leaves):
            e = expression_of(t) if isinstance(t, Tensor) else None
            if e is not None and t.requires_grad:
                self.parameters_at.append(i)
                self.expressions.append(e)
        self.data_at = [
            i
            for i, t in enumerate(self.leaves)
            if isinstance(t, Tensor) and i not in self.parameters_at
        ]

    def keep_first(self) -> None:
        """Keep the first argument, a constant that the function will write to, for later runs."""
        if 0 not in self.parameters_at:
            self.constants = [self.leaves[0].detach().clone(), *self.leaves[1:]]

    def run(self) -> Any:
        """The result of the function."""
        args, kwargs = self._given
        return self.function.func(*args, **kwargs)

    def as_now(self, draws: bool = False) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which the function computes as if it ran now: under the same autocast, and
        with the same random numbers if it ``draws`` some, as those in ``RANDOM`` always do.
        """
        tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        kind, devices = tensors[0].device.type, {t.device for t in tensors if t.is_cuda}
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        draws = draws or self.name in RANDOM
        state = torch.get_rng_state() if draws else None
        states = [(torch.cuda.get_rng_state(d), d) for d in devices] if draws else []

        @contextmanager
        def now() -> Iterator[None]:
            enabled, dtype = autocast
            with (
                torch.autocast(kind, dtype, enabled),
                torch.random.fork_rng(devices=devices, enabled=state is not None),
            ):
                if state is not None:
                    torch.set_rng_state(state)
                for cuda_state in states:
                    torch.cuda.set_rng_state(*cuda_state)
                yield

        return now

    def run_with(self, values: dict[int, Any]) -> Any:
        """The result of the function with other values at some places."""
        return self.function([values.get(i, t) for i, t in enumerate(self.leaves)])

    @property
    def is_scaled(self) -> bool:
        """Whether ``add`` or ``sub`` multiplies what it adds."""
        args, kwargs = self._given
        return "alpha" in kwargs or (self.name == "rsub" and len(args) > 2)

    @property
    def index(self) -> Any:
        """The index of ``__getitem__`` and ``__setitem__``."""
        return self._given[0][1]


def numbered(args: Any) -> Any:
    """The arguments of an index. That of a parameter by one number which is a tensor becomes that
    number.
    """
    t, index = args
    alone = isinstance(index, Tensor) and index.ndim == 0
    if alone and not index.is_floating_point() and index.dtype != torch.bool:
        return t, int(index)
    return args


def chance_of(leaves: list[Any]) -> list[Any]:
    """What changes when a function draws random numbers on the devices of its tensors."""
    gpus = {t.device.index for t in leaves if isinstance(t, Tensor) and t.is_cuda}
    offsets = [torch.cuda.default_generators[k].get_offset() for k in sorted(gpus)]
    return [torch.get_rng_state().view(torch.int64).tolist(), *offsets]

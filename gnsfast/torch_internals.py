# SPDX-License-Identifier: Apache-2.0
"""All that gnsfast uses of torch without a public name, each with what it is relied on for. A test
for each (``tests/test_torch_internals.py``) tells when torch changes it.

What a tensor, a module or a node of autograd's graph has as an attribute is read where it is used:
``_version``, ``_is_view``, ``_parameters``, ``_buffers``, ``_modules``. These have tests too.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree
from torch.utils import checkpoint as torch_checkpoint

pytree = _pytree
"""Takes nested arguments and results apart, and puts them together again."""

# Classes and functions of tensors

unfollowed = torch._C.DisableTorchFunctionSubclass
"""Inside, functions of torch do not ask the classes of their arguments."""

takes_no_functions: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that functions of torch do not ask."""

rebuilt_parameter: Any = torch._utils._rebuild_parameter
"""What a pickle of a parameter calls when it is loaded."""

foreach_norm: Any = torch._foreach_norm
"""The norms of many tensors, by few kernels."""

unsafe_view: Any = torch.ops.aten._unsafe_view
"""A view that autograd takes for a new tensor, which may be written to."""

grouped_mm: Any = torch._grouped_mm
"""What ``F.grouped_mm`` calls: rows that are sorted by expert, times a matrix of each."""

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see each operator: those of ``make_fx``, and of selective checkpoints."""

without_modes: Any = _python_dispatch._disable_current_modes
"""Inside, no such mode of the user sees anything."""

is_profiled = torch._C._autograd._profiler_enabled
"""Whether a profiler wants to see each operator."""

any_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device. Asking for one device takes five times as long."""


def is_transformed() -> bool:
    """Whether a function runs inside of ``torch.func.vmap`` or its likes."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def cuda_stream(device: int) -> int:
    """``torch.cuda.current_stream(device).cuda_stream`` without creating a stream object."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


# Backward passes and their graphs

_graph_task = torch._C._current_graph_task_id

runs_in_this_pass: Any = torch._C._will_engine_execute_node
"""Whether the backward pass that is running goes to a node. RuntimeError in ``autograd.grad`` of
that node's own leaf.
"""


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return _graph_task() != -1


def result_of(node: Any, number: int) -> Any:
    """The ``shape`` and the ``device`` of result ``number`` of a node of a graph."""
    return node._input_metadata[number]


def saved(node: Any, name: str) -> Any:
    """What a node keeps of the arguments of its function, by name."""
    return getattr(node, f"_saved_{name}")


# Checkpoints

FIRST_FORWARD, SECOND_FORWARD = "_checkpoint_hook", "_recomputation_hook"
"""The contexts in which a non-reentrant checkpoint runs: both are classes of
``torch.utils.checkpoint``, and set hooks for saved tensors."""


StopRecomputation: Any = torch_checkpoint._StopRecomputationError
"""How a checkpoint ends its second forward early, out of whatever saves the last tensor it needs:
it is no error."""


def saves_for(context: str) -> bool:
    """Whether what is saved now goes to hooks of one of these contexts."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and context in getattr(hooks[0], "__qualname__", "")


# Modules

BatchNorm = nn.modules.batchnorm._BatchNorm
"""The class of all batch norms, also of the synchronised one."""


def compiled_module(module: nn.Module) -> Any:
    """The module that ``torch.compile`` has wrapped; None of any other module."""
    return getattr(module, "_orig_mod", None)


@contextmanager
def fresh_parametrizations() -> Iterator[None]:
    """Compute parametrizations anew, apart from what ``parametrize.cached()`` has computed."""
    cached = parametrize._cache
    try:
        parametrize._cache = {}
        yield
    finally:
        parametrize._cache = cached


def hooks_of(p: Tensor) -> tuple[Any, Any]:
    """The hooks of a parameter that run before and after its gradient is accumulated. None stands
    for a dictionary that there was no need for.
    """
    return p._backward_hooks, p._post_accumulate_grad_hooks


def scaler_states(scaler: Any) -> list[dict[str, Any]]:
    """What a ``GradScaler`` has done for each optimizer: ``state["stage"]``."""
    return [*scaler._per_optimizer_states.values()]


# The compiler


def is_compiler_loaded() -> bool:
    """Whether anything was compiled. To import the compiler takes a second."""
    return "torch._dynamo" in sys.modules


def break_graph(why: str) -> None:
    """End a compiled graph here, or raise with ``fullgraph=True``."""
    torch._dynamo.graph_break(msg=why)


def is_never_compiled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` has made a function."""
    return hasattr(function, "_torchdynamo_disable")


def skip_in_compiler(*functions: Any) -> None:
    """Let functions that eager code calls be no graphs of their own, with all that they call."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


# Processes that share parameters


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was applied to a module itself."""
    return hasattr(module, "_get_fsdp_state")


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The groups of parameters that FSDP2 shards together, with the paths of their modules. Their
    ``fsdp_params`` are the records of the parameters, with ``sharded_param`` and
    ``to_unsharded()``; ``mesh_info`` tells over how many processes.
    """
    for path, module in model.named_modules():
        state: Any = module._get_fsdp_state() if is_fully_sharded(module) else None
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            yield path, group


def gathered_parameters(record: Any) -> list[Any]:
    """The parameters that FSDP2 puts into a module in the place of a sharded one: during a pass the
    gathered one, which comes first and is None before, and after a pass without backward another.
    """
    held = ("_unsharded_param", "_sharded_post_forward_param")
    return [getattr(record, name, None) for name in held]


def local_shape_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[Any, Any]:
    """The shape of the part of a DTensor that is on this process, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def process_groups() -> list[Any]:
    """All groups of processes that this process is in, each with a name and a description."""
    return [*torch.distributed.distributed_c10d._world.pg_map]


def root_mesh(mesh: Any) -> Any:
    """The mesh of which a device mesh is a part."""
    return mesh._get_root_mesh()


def functions_of_context_parallel() -> dict[Any, Any]:
    """The functions that ``context_parallel`` has replaced, with what they were. They stay after it
    ends.
    """
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    replaced: Any = getattr(sys.modules.get(name), "_replaced_functions", None)
    return replaced or {}


def splits_sequences(module: nn.Module) -> bool:
    """Whether a plan of torch's context parallelism, as torchtitan's, is on a module."""
    hooks = module._forward_pre_hooks.values()
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
    return any(type(owner).__name__ == "_ContextParallel" for owner in owners)

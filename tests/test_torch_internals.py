# SPDX-License-Identifier: Apache-2.0
"""What gnsfast uses of torch without a public name exists and does what it is relied on for. A
failure here, with a new version of torch, names what has changed.
"""

import ast
import operator
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from gnsfast import torch_internals as internals
from gnsfast.following import owners

PACKAGE = Path(internals.__file__).parent


def private_names(path: Path) -> Iterator[str]:
    """What a file takes of torch that has no public name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            name = ".".join([node.module or "", *(alias.name for alias in node.names)])
        else:
            continue
        if name.startswith(("torch.", "nn.", "F.", "dist.")) and re.search(r"\._(?!_)", name):
            yield name


def test_private_names_are_in_one_file() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if "triton_kernels" not in p.parts]
    reached = {p.relative_to(PACKAGE).as_posix(): [*private_names(p)] for p in files}
    assert reached.pop("torch_internals.py")
    assert not {name: names for name, names in reached.items() if names}


class Seen(Tensor):
    """Notes the functions of torch that take it."""

    names: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(func.__name__)
        with internals.unfollowed():
            return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Seen.names.clear()


def seen(t: Tensor) -> Any:
    return t.as_subclass(Seen)


def test_pytree() -> None:
    leaves, spec = internals.pytree.tree_flatten(((1, [2]), {"a": 3}))
    assert leaves == [1, 2, 3]
    assert internals.pytree.tree_unflatten(leaves, spec) == ((1, [2]), {"a": 3})
    assert internals.pytree.tree_is_leaf(nn.Linear(1, 1))


def test_unfollowed() -> None:
    t = seen(torch.ones(2))
    with internals.unfollowed():
        assert type(t + 1) is Tensor
    assert not Seen.names
    _ = t + 1
    assert Seen.names == ["add"]


def test_a_class_that_takes_no_functions() -> None:
    assert nn.Parameter.__torch_function__ is internals.takes_no_functions
    default: Any = Tensor.__torch_function__
    assert Seen.__torch_function__.__func__ is not default.__func__


def test_names_of_functions() -> None:
    """Torch gives a class the function that was called, by a name that gnsfast knows."""
    w, images = seen(torch.ones(2, 2)), seen(torch.ones(1, 2, 2, 2))
    cell, xs = nn.LSTM(2, 2), torch.ones(3, 1, 2)
    with torch.no_grad():
        cell.weight_ih_l0.__class__ = type("P", (Seen, nn.Parameter), {})
        calls: dict[str, Callable[[], Any]] = {
            "linear": lambda: F.linear(w, w),
            "lstm": lambda: cell(xs),
            "group_norm": lambda: F.group_norm(images, 1),
            "matmul": lambda: w @ w,
            "__getitem__": lambda: w[0],
            "__setitem__": lambda: operator.setitem(w, 0, 1.0),
            "__get__": lambda: w.shape,
            "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(w, w, w),
        }
        for name, call in calls.items():
            Seen.names.clear()
            call()
            assert name in Seen.names, name


def test_opened_functions_ask_by_a_global_name() -> None:
    for f in (F.multi_head_attention_forward, torch.autograd.grad, torch.autograd.backward):
        assert {"has_torch_function", "has_torch_function_unary"} & {*f.__code__.co_names}, f


def test_rebuilt_parameter() -> None:
    copied = internals.rebuilt_parameter(torch.ones(2), True, {})
    assert type(copied) is nn.Parameter and copied.requires_grad
    assert type(pickle.loads(pickle.dumps(copied))) is nn.Parameter


def test_unsafe_view() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    y = internals.unsafe_view(x, (2,))
    assert not y._is_view() and y.data_ptr() == x.data_ptr()
    assert x.view(2)._is_view()


def test_grouped_mm() -> None:
    names: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    x, w = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(1, 16, 16, dtype=torch.bfloat16)
    with Mode():
        F.grouped_mm(x, w, offs=torch.tensor([4], dtype=torch.int32))
    assert internals.grouped_mm in names


def test_norms_of_many_tensors() -> None:
    norms = internals.foreach_norm([torch.ones(4), torch.full((2, 2), 3.0)], 2, dtype=torch.float32)
    assert [t.item() for t in norms] == [2.0, 6.0]


def test_versions_count_writes() -> None:
    t = torch.ones(2)
    assert t._version == 0 and t.add_(1)._version == 1
    t.data.mul_(2)  # which does not count
    assert t._version == 1


def test_dispatch_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Mode.calls += 1
            return func(*args, **(kwargs or {}))

    assert internals.dispatch_modes() == 0
    with Mode():
        assert internals.dispatch_modes() == 1
        with internals.without_modes():
            torch.ones(1)
    assert Mode.calls == 0


def test_profiler_and_autocast() -> None:
    assert not internals.is_profiled() and not internals.any_autocast()
    with torch.profiler.profile():
        assert internals.is_profiled()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.any_autocast()


def test_transforms() -> None:
    assert not internals.is_transformed()
    inside: list[bool] = []
    torch.func.vmap(lambda x: inside.append(internals.is_transformed()) or x)(torch.ones(2))
    assert inside == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_stream() -> None:
    assert internals.cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_backward_passes() -> None:
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(other).node
    runs: list[tuple[bool, bool]] = []
    y = x * 2 * other
    y.register_hook(
        lambda g: runs.append((internals.in_backward(), internals.runs_in_this_pass(node)))
    )
    y.sum().backward(retain_graph=True)
    y.sum().backward(inputs=[x])
    assert runs == [(True, True), (True, False)] and not internals.in_backward()


def test_nodes_of_a_graph() -> None:
    """The names, and what they save, by which ``owners.py`` finds the samples of chosen rows."""
    x = torch.randn(4, 3, requires_grad=True)
    rows, ids, mask = torch.tensor([2, 0]), torch.zeros(4, 3).long(), torch.ones(4, 3).bool()
    nodes = {
        y.grad_fn.name().removesuffix("Backward0"): y.grad_fn
        for y in (
            *(x[rows], x.index_select(0, rows), x.gather(0, ids), x.masked_select(mask)),
            *(x.flip(0), x.roll(1, 0), torch.stack([x, x]), x.split([1, 3])[1], x[1:3], x[1]),
            *(x.unbind()[1], x.unsqueeze(0), x.t(), x.permute(1, 0), x.view(12), x.clone()),
            *(x.transpose(0, 1), x.expand(2, 4, 3), x.to(torch.float64), x[:, :1].squeeze()),
            *(x.as_strided((2,), (1,)), x.split(2)[0], F.embedding(ids, x)),
            torch.ops.aten.alias(x),
            *(internals.unsafe_view(x * 1, (12,)), x.t().reshape(12)),
            *(x.index_add(0, rows, x[:2]), x.index_copy(0, rows, x[:2])),
            *(x.index_put((rows,), x[:2]), x.scatter(0, ids, x), x.scatter_add(0, ids, x)),
            x.masked_scatter(mask, x),
        )
    }
    known = owners.ALONG | owners.MOVES | owners.INSERTS | owners.VIEWS | owners.CHOICES
    absent = {name.removesuffix("Backward0") for name in known} - nodes.keys()
    assert absent <= {"ReshapeAlias"}, absent
    saved = internals.saved
    assert saved(nodes["Index"], "indices")[0].equal(rows)
    assert saved(nodes["IndexSelect"], "index").equal(rows)
    assert [saved(nodes[n], "dim") for n in ("IndexSelect", "Gather", "Stack", "Select")] == [0] * 4
    assert [saved(nodes[n], "dim") for n in ("Unbind", "SplitWithSizes", "Slice")][0] == 0
    assert saved(nodes["Select"], "index") == 1
    assert [*saved(nodes["SplitWithSizes"], "split_sizes")] == [1, 3]
    node = x[1:3].grad_fn
    assert (saved(node, "start"), saved(node, "step")) == (1, 1)
    assert saved(node, "self_sym_sizes")[0] == 4
    result = internals.result_of(nodes["Flip"], 0)
    assert torch.Size(result.shape) == (4, 3) and result.device == x.device
    nodes["Flip"].metadata["gnsfast"] = 1
    assert nodes["Flip"].metadata["gnsfast"] == 1


def test_checkpoints() -> None:
    contexts: list[tuple[bool, bool]] = []

    def run(x: Tensor) -> Tensor:
        both = internals.FIRST_FORWARD, internals.SECOND_FORWARD
        contexts.append((internals.saves_for(both[0]), internals.saves_for(both[1])))
        return x.sin()

    y: Any = checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert contexts == [(True, False), (False, True)] and not internals.saves_for("_checkpoint")
    ends: list[Exception] = []

    def saves_too_much(x: Tensor) -> Tensor:
        try:
            return x.sin() * x.cos()
        except internals.StopRecomputation as error:
            ends.append(error)
            raise

    y = checkpoint(saves_too_much, torch.ones(2, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert len(ends) == 1
    held = vars(sys.modules["torch.utils.checkpoint"])
    assert internals.FIRST_FORWARD in held and "apply" in dir(held["CheckpointFunction"])


def test_modules() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.Linear(2, 2))
    assert [isinstance(m, internals.BatchNorm) for m in model] == [True, True, False]
    assert {*model[0]._buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    assert {*model[2]._parameters} == {"weight", "bias"} and {*model._modules} == {"0", "1", "2"}
    assert internals.compiled_module(torch.compile(model)) is model
    assert internals.compiled_module(model) is None
    hooks = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    assert hooks <= {*vars(model)}


def test_parametrizations_are_cached() -> None:
    layer = weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        once = layer.weight
        with internals.fresh_parametrizations(), parametrize.cached():
            assert layer.weight is not once
        assert layer.weight is once


def test_hooks_of_a_parameter() -> None:
    p = nn.Parameter(torch.ones(2))
    assert internals.hooks_of(p) == (None, None)
    p.register_hook(lambda g: None)
    p.register_post_accumulate_grad_hook(lambda p: None)
    before, after = internals.hooks_of(p)
    assert len(before) == len(after) == 1
    before.clear()  # the very dictionaries that torch holds
    after.clear()
    p.register_hook(lambda g: g * 3)
    p.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [3, 3]


def test_states_of_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    p = nn.Parameter(torch.ones(2))
    scaler.scale(p.sum()).backward()
    scaler.unscale_(torch.optim.SGD([p], 1.0))
    [state] = internals.scaler_states(scaler)
    assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED


def test_compiler() -> None:
    def broken(x: Tensor) -> Tensor:
        internals.break_graph("here")
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="here"):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    assert internals.is_compiler_loaded()
    assert internals.is_never_compiled(torch.compiler.disable(broken))
    assert not internals.is_never_compiled(broken)


def test_what_the_compiler_skips() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inner(x)

    internals.skip_in_compiler(inner)
    torch.compile(inner, backend=backend)(torch.ones(2))
    assert not graphs


@pytest.fixture
def mesh() -> Any:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def test_fully_sharded_modules(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    assert [internals.is_fully_sharded(m) for m in model] == [True, False]
    [(path, group)] = internals.parameter_groups(model)
    weight, _ = group.fsdp_params
    assert path == "0" and weight.sharded_param is model[0].weight
    assert group.mesh_info.shard_mesh_size == 2
    assert internals.gathered_parameters(weight) == [None, None]
    model[0].unshard()
    assert internals.gathered_parameters(weight)[0] is model[0].weight
    assert callable(weight.to_unsharded) and callable(model[0].reshard)


def test_parts_of_dtensors(mesh: Any) -> None:
    shape, offset = internals.local_shape_and_offset(torch.Size((4, 2)), mesh, [Shard(0)])
    assert tuple(shape) == (2, 2) and tuple(offset) == (0, 0)
    assert internals.root_mesh(mesh) == mesh
    [whole, *_] = groups = internals.process_groups()
    assert whole is dist.group.WORLD and mesh.get_group() in groups
    assert whole.group_name != "" and whole.group_desc
    t = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    assert t.placements == (Replicate(),)


def test_context_parallel(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    monkeypatch.setitem(_attention._replaced_functions, F.linear, F.linear)
    assert internals.functions_of_context_parallel() == {F.linear: F.linear}
    kinds = _attention._ContextParallel.AttentionType
    layer, plan = nn.Identity(), _attention._ContextParallel(2, kinds.SDPA)
    assert not internals.splits_sequences(layer)
    parallelize_module(layer, mesh, plan)
    assert internals.splits_sequences(layer)

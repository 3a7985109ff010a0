# SPDX-License-Identifier: Apache-2.0
"""``TorchRun``: a plain torch training loop whose branches can be trained."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnsfast.arguments import integer
from gnsfast.critical_batch.branches.branch_protocol import BranchStep
from gnsfast.critical_batch.branches.run_state import load_run, read_run, save_run
from gnsfast.critical_batch.critical_batch_factor import RunIdentity
from gnsfast.critical_batch.rules import Rules, set_lr
from gnsfast.estimator import GradientNoiseScale, fitting_metrics, optimizer_for
from gnsfast.kept import kept, kept_chance
from gnsfast.noise_scale import NoiseScale
from gnsfast.parallel import find_processes, fsdp_degrees, mean
from gnsfast.torch_internals import pytree

COMPARED = 4
"""So many micro-batches of an update are compared where the noise scale has other metrics."""


class Stream(Protocol):
    """Training samples in a fixed order, at a position that can be saved."""

    def draw(self, n: int, /) -> Any:
        """The next ``n`` samples as one batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as numbers, strings and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class TorchRun:
    """A model, its optimizer and its data as a ``BranchRun``, in one process or several.

    Several processes (DDP, FSDP2) make a run each, after ``init_process_group``, of the same model,
    wrapped, and a stream that draws this process's share, such as ``SampleStream(rank=...)``. All
    of them call its methods. Batch sizes are over all processes, and losses are their mean.

    Ordinary training calls ``step()`` too, so that a branch and the run that was never branched use
    the same code: after ``restore`` the same steps follow, bit for bit.

    Args:
        model, optimizer: in the state that they train in. A step never changes their modes.
        loss_fn: ``loss_fn(model, batch)``, a mean over the samples of the batch.
        stream: ``draw(n)``, ``state_dict()``, ``load_state_dict(state)``.
        batch_size: samples of an optimizer step; ``run.batch_size`` may be set between steps.
        tokens_per_sample: converts samples into tokens, in which progress is counted.
        micro_batch: the most samples of one forward pass of a process; a step accumulates as many
            passes as it needs.
        lr: a schedule: the tokens trained before a step -> factor of the initial learning rate
            (``group["initial_lr"]``, where a group has one, else its ``lr`` at the first step). It
            continues in branches. None leaves the groups' ``lr`` alone: your own scheduler may
            change it between steps, and it is constant in branches.
        clip: the largest 2-norm of a gradient.
        evaluate: ``evaluate(model)``, a mean loss on samples that are always the same. TorchRun
            calls it in evaluation mode, without gradients, and takes the mean over processes.
        betas, weight_decay: the rules (``Rules``) by which a branch with k times the batch changes
            them from those of the run.
        gns: an estimator that measures every step, also in branches. Its window is saved with the
            run.
        device: the device that the tensors of a batch are moved to.
        tokens: the tokens that the model was trained on before.

    Random numbers may come from the global generators of torch, Python and NumPy, and from
    generators that ``stream.state_dict()`` holds. Gradient scalers (fp16) are not supported.

    Raises:
        ValueError: for an invalid setting.

    >>> from gnsfast.critical_batch import TorchRun
    >>> class Noise:
    ...     def draw(self, n): return torch.randn(n, 5)
    ...     def state_dict(self): return {}
    ...     def load_state_dict(self, state): pass
    >>> model = torch.nn.Linear(5, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = lambda model, x: model(x).square().sum(1).mean()
    >>> run = TorchRun(model, optimizer, loss, Noise(), batch_size=16, tokens_per_sample=1)
    >>> steps = [run.step() for _ in range(4)]
    >>> run.tokens
    64
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        stream: Stream,
        *,
        batch_size: int,
        tokens_per_sample: int,
        micro_batch: int | None = None,
        lr: Callable[[int], float] | None = None,
        clip: float | None = None,
        evaluate: Callable[[nn.Module], float] | None = None,
        betas: str = "keep",
        weight_decay: str = "keep",
        gns: GradientNoiseScale | None = None,
        device: torch.device | str | None = None,
        tokens: int = 0,
    ) -> None:
        self.rules = Rules("keep", betas, weight_decay)  # train() is told the learning rate's
        self.rules.check(optimizer, 1.0)
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be a positive norm, not {clip!r}")
        self.model, self.optimizer, self.loss_fn, self.stream = model, optimizer, loss_fn, stream
        self.batch_size = integer("batch_size", batch_size)
        self.tokens_per_sample = integer("tokens_per_sample", tokens_per_sample)
        self.micro_batch = None if micro_batch is None else integer("micro_batch", micro_batch)
        self.lr, self.clip, self.gns, self.device = lr, clip, gns, device
        self.batch_multiple = _data_parallel(model)
        self.evaluate = None if evaluate is None else lambda: self._evaluate(evaluate)
        self.noise_scale_reason = ""
        self._tokens = integer("tokens", tokens, 0)
        self._rates: list[float] = []  # that the schedule set; empty before its first step

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        return self._tokens

    def identity(self) -> RunIdentity:
        """Model, optimizer, and as ``data`` the stream's ``name``, where it has one."""
        return RunIdentity.of(self.model, self.optimizer, data=getattr(self.stream, "name", None))

    def step(self) -> BranchStep:
        """Take an optimizer step of the unbranched run."""
        return self._step(self.batch_size, 1.0)

    def train(
        self, tokens: int, *, batch_size: int | None = None, lr_factor: float = 1.0
    ) -> Iterator[BranchStep]:
        """Take steps until at least ``tokens`` tokens are trained, by default the run's own."""
        size = self.batch_size if batch_size is None else integer("batch_size", batch_size)
        done = 0
        while done < tokens:
            step = self._step(size, lr_factor)
            done += step.tokens
            yield step

    def skip(self, tokens: int) -> None:
        """Draw whole batches of at least ``tokens`` tokens, and train on none of them."""
        for _ in range(0, integer("tokens", tokens), self.batch_size * self.tokens_per_sample):
            self.stream.draw(self.batch_size)

    def _step(self, batch_size: int, lr_factor: float) -> BranchStep:
        self._schedule()
        loss = self._backward(batch_size, self.gns)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        with self.rules.moved(self.optimizer, batch_size / self.batch_size, lr_factor):
            self.optimizer.step()
        self._zero_grad()
        tokens = batch_size * self.tokens_per_sample
        self._tokens += tokens
        return BranchStep(tokens, loss)

    def _zero_grad(self) -> None:
        """Clear all gradients: ``clip`` would count those of parameters without an optimizer."""
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def _schedule(self) -> None:
        """Set the learning rates of this step by the schedule."""
        if self.lr is None:
            return
        groups = self.optimizer.param_groups
        if self._rates not in ([], [float(g["lr"]) for g in groups]):
            raise ValueError(
                "the learning rate of a parameter group has changed, but TorchRun(lr=...) sets it "
                "in every step: put the change into lr, or pass lr=None and set the rates yourself"
            )
        factor = self.lr(self._tokens)
        for group in groups:
            set_lr(group, group.setdefault("initial_lr", float(group["lr"])) * factor)
        self._rates = [float(g["lr"]) for g in groups]

    def _backward(
        self, batch_size: int, gns: GradientNoiseScale | None, least_passes: int = 1
    ) -> float:
        """Accumulate the gradient of a batch by micro-batches, of which each process has
        ``least_passes`` or more where it has as many samples; returns the mean loss.
        """
        processes = self.batch_multiple
        if batch_size % processes:
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of the {processes} processes"
            )
        largest = max(1, batch_size // (processes * least_passes))
        largest = min(self.micro_batch or largest, largest)
        losses = []
        with nullcontext() if gns is None else gns.update():
            for start in range(0, batch_size, largest * processes):
                n = min(largest * processes, batch_size - start)
                batch, share = self._draw(n), n / batch_size
                with nullcontext() if gns is None else gns.microbatch(n // processes, scale=share):
                    loss = self.loss_fn(self.model, batch) * share
                    loss.backward()
                losses.append(loss.detach())
        return mean(torch.stack(losses).sum())

    def _draw(self, n: int) -> Any:
        """This process's share of the next ``n`` samples."""
        batch = self.stream.draw(n)
        if self.batch_multiple > 1:
            tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim]
            sizes = {len(t) for t in tensors}
            if n in sizes and n // self.batch_multiple not in sizes:
                raise ValueError(
                    f"the stream's draw({n}) returned all {n} samples in each of "
                    f"{self.batch_multiple} processes. It must return this process's share, as "
                    "SampleStream(rank=..., world_size=...) does"
                )
        if self.device is None:
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device), batch)

    def branch_settings(self) -> dict[str, Any]:
        """Settings that must be the same whenever a folder of branches is continued."""
        lr, optimizer = None if self.lr is None else "scheduled", type(self.optimizer).__name__
        moved = {"betas": self.rules.betas, "weight_decay": self.rules.weight_decay}
        return {"optimizer": optimizer, "lr": lr, "clip": self.clip, **moved}

    def check_branch(self, k: float) -> None:
        """Raise ValueError where the optimizer cannot follow to ``k`` times the batch."""
        self.rules.check(self.optimizer, k)

    def save(self, folder: Path) -> None:
        """Write model, optimizer, random number generators, data position and progress, which
        ``torch.load(weights_only=True)`` reads. Each of several processes writes a file.
        """
        own = {
            "tokens": self._tokens,
            "batch_size": self.batch_size,
            "tokens_per_sample": self.tokens_per_sample,
            "stream": self.stream.state_dict(),
            "gns": None if self.gns is None else self.gns.state_dict(),
        }
        save_run(Path(folder), self.model, self.optimizer, own)

    def restore(self, folder: Path) -> None:
        """Load what ``save`` wrote.

        Raises:
            ValueError: where it was saved with other settings.
        """
        state = read_run(Path(folder))
        if state["tokens_per_sample"] != self.tokens_per_sample:
            raise ValueError(
                f"{folder} was saved with tokens_per_sample={state['tokens_per_sample']}, but this "
                f"run has tokens_per_sample={self.tokens_per_sample}: make both the same"
            )
        if (state["gns"] is None) != (self.gns is None):
            raise ValueError(
                f"{folder} was saved by a run {'with' if state['gns'] else 'without'} gns=...: "
                f"make this TorchRun {'with' if state['gns'] else 'without'} it too"
            )
        self.stream.load_state_dict(state["stream"])
        if self.gns is not None:
            self.gns.load_state_dict(state["gns"])
        self._tokens, self.batch_size, self._rates = state["tokens"], state["batch_size"], []
        load_run(Path(folder), self.model, self.optimizer, state)
        self._zero_grad()

    def noise_scale(self, batches: int = 40) -> NoiseScale | None:
        """The noise scale at the present weights, from the next ``batches`` batches of the stream.

        It includes other metrics that fit the optimizer: those of Adam and sign descent for a
        ``torch.optim.Adam`` or ``AdamW`` that has stepped, that of spectral descent for ``Muon``,
        and that of sign descent for any other optimizer. They compare micro-batches, so each batch
        is split into four or more, where it has as many samples.

        Weights, gradients, buffers, random numbers and data position are restored afterwards. The
        result is None if the model has no trainable parameter, and ``noise_scale_reason`` then says
        so.
        """
        integer("batches", batches, 2)
        self.noise_scale_reason = ""
        if not any(p.requires_grad for p in self.model.parameters()):
            self.noise_scale_reason = "the model has no trainable parameter"
            return None
        metric = fitting_metrics(self.model, self.optimizer) if self.batch_size > 1 else ()
        optimizer = optimizer_for(metric, self.optimizer)
        gns = GradientNoiseScale(self.model, window=batches, metric=metric, optimizer=optimizer)
        with self._restored():
            for _ in range(batches):
                self._backward(self.batch_size, gns, COMPARED if metric else 1)
                for p in self.model.parameters():
                    p.grad = None
        return gns.compute()

    def _evaluate(self, evaluate: Callable[[nn.Module], float]) -> float:
        with self._restored(), torch.no_grad():
            self.model.eval()
            return mean(evaluate(self.model))

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore the run afterwards to its state before the block."""
        stream = copy.deepcopy(self.stream.state_dict())
        with kept_chance(self.model), ExitStack() as stack:
            stack.callback(self.stream.load_state_dict, stream)
            with kept(self.model):
                yield


def _data_parallel(model: nn.Module) -> int:
    """The processes that train ``model`` on samples of their own.

    Raises:
        ValueError: where they train a model each, because it is not wrapped.
    """
    processes = find_processes(model, None).data
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if processes > 1 and not wrapped and not fsdp_degrees(model):
        raise ValueError(
            f"each of the {processes} processes would train a model of its own: wrap the model in "
            "DistributedDataParallel or fully_shard before you make the TorchRun"
        )
    return processes

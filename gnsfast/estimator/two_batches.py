# SPDX-License-Identifier: Apache-2.0
"""``TwoBatchNoiseScale``: the noise scale from gradients alone.

The unit k is one backward pass of one process, with U_k = Σ u_b over its samples. Its gradient is
that of a small batch, the sum of all units that of the large one:

    E Σ ‖g_k‖² = W |G|² + S,    E ‖Σ g_k‖² = V |G|² + S,    W = Σ U_k²,    V = (Σ U_k)²

with S = Σ u_b² v_b. These are the equations of ``noise_scale.statistics`` with W in the place of U₂
= Σ u_b², so all that follows from p and q follows from these two.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast import reference
from gnsfast.arguments import check_choice, integer
from gnsfast.combinations import MICRO_BATCHES, TENSOR_PARALLEL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator import gradients
from gnsfast.estimator.exchange import another_norm
from gnsfast.estimator.fingerprint import Fingerprint, rewritten
from gnsfast.estimator.given_norm import GivenNorm, averages
from gnsfast.estimator.micro_batch_noise import Arrivals, refuse_numbers, trained
from gnsfast.estimator.saved_state import refuse_other
from gnsfast.noise_scale import NOT_MEASURED, NoiseScale, loss_factors, summarize
from gnsfast.parallel import find_processes, refuse_context_parallel
from gnsfast.probing import AUDIT_EVERY, NO_BACKWARD, checks, unwrapped
from gnsfast.tensors import accumulate_dtype

SCALARS = loss_factors.SCALARS
FLAGS = 5
"""The last numbers of an update: whether gradients were written to after backward, whether they
were not zero before it, whether ``grad_norm`` is another norm; q of a process and its square."""


class TwoBatchNoiseScale:
    """Measure the gradient noise scale tr Σ / |G|² of any model, from its gradients alone.

    It compares the gradient of each micro-batch, of each process, with that of the whole update, so
    it holds all parameters that are trained, whatever the model does. An update needs two
    micro-batches or processes, better four or more. Without bias, but less certain than
    ``GradientNoiseScale``, which sees single samples: of n samples in K micro-batches, tr Σ has up
    to √((n - 1) / (K - 1)) times the error, and |G|² √((n - 1) / (n - n / K)) times.
    ``compute().excess`` holds both factors, ``print`` says them, and ``noise_from`` is
    ``"micro_batches"``. It costs one more reading of each gradient in a micro-batch.

    Args:
        model: any model; under DDP the wrapped or the inner one. FSDP2 and tensor parallelism are
            refused: a hook on a parameter must see the whole gradient of one process.
        window: the number of newest measured updates that ``compute()`` averages.
        decay: the weight of an update relative to the next newer one; no interval below 0.82.
        every: measure one update in so many; the others are plain torch.
        loss_reduction: ``"mean"`` over the micro-batch's samples (or tokens), or ``"sum"``.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss.
        process_group: the processes that average their gradients; by default all processes.

    Samples that depend on each other, as through batch norm, are not seen: the noise scale is then
    one of micro-batches of this size.

    Raises:
        ValueError: for a model without trained parameters, or a setting that is not possible.
        ObservationError: where a pass or a gradient is missing or was written to, with the remedy.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.

    >>> model = torch.nn.GRU(5, 2, batch_first=True)
    >>> gns = gnsfast.TwoBatchNoiseScale(model)
    >>> for update in torch.randn(8, 4, 16, 3, 5):
    ...     for x in update:
    ...         with gns.microbatch(16, scale=1 / 4):
    ...             (model(x)[0].square().sum((1, 2)).mean() / 4).backward()
    ...     gns.update()
    ...     model.zero_grad()
    >>> gns.compute().noise_from
    'micro_batches'
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int = 64,
        decay: float | None = None,
        every: int = 1,
        loss_reduction: str = "mean",
        grad_scaler: GradScaler | None = None,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        if decay is not None and not 0 < decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {decay!r}")
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        self.model, self.decay = model, decay
        self.window, self.every = integer("window", window), integer("every", every)
        self._loss_reduction, self._scaler = loss_reduction, grad_scaler
        self._group = process_group
        self.reset()

    def reset(self) -> None:
        """Forget all measurements, and look at the model's parameters again."""
        if not trained(unwrapped(self.model)):
            raise ValueError(f"{type(self.model).__name__} has no trainable parameter")
        self._ring: deque[Tensor] = deque(maxlen=self.window)
        self._seen, self._inside = 0, False
        self._take({})
        self._forget()

    def _take(self, parameters: dict[str, nn.Parameter]) -> None:
        """Measure these: those of the first micro-batch, when the model is wrapped and moved."""
        self._parameters, self._all = parameters, list(parameters.values())
        self._arrivals = Arrivals(parameters, self._arrived)
        if parameters:
            self._device = self._all[0].device
            self._prints = Fingerprint(parameters, self._device, True, ())
            self._processes = find_processes(self.model, self._group, None)
            if self._processes.tensor > 1:
                refuse([MICRO_BATCHES, TENSOR_PARALLEL])
            averaged = averages(self.model, self._processes, [True])
            self._given = GivenNorm(self._all, self._processes, averaged)

    def _look(self) -> None:
        if not self._parameters:
            self._take(trained(unwrapped(self.model)))

    def discard(self) -> None:
        """Forget the update under way. The caller has to call ``optimizer.zero_grad()``."""
        self._arrivals.stop()
        self._inside = False
        if self._parameters:
            self._prints.finish()
        self._forget()

    def _forget(self) -> None:
        """Begin an update."""
        self._passes: list[tuple[Tensor, Tensor]] = []
        self._before: list[Any] = []
        self._ends: list[Any] = []
        self._waiting = False
        self._all_read: gradients.Sqnorms | None = None
        self._own: dict[str, Tensor] = {}

    def _arrived(self, name: str, grad: Tensor) -> None:
        if not self._waiting:
            self._pass_begins()
        if grad.device.type == "cpu":  # where torch's own norm is 1e-3 low at 16.8M elements
            self._own[name] = reference.sqnorm(grad)
        else:
            norm = torch.linalg.vector_norm(grad, dtype=accumulate_dtype(grad.dtype))
            self._own[name] = norm.double().square()

    def _pass_begins(self) -> None:
        """Before the first gradient is added to ``.grad``. What the block did before counts."""
        if self._passes:
            self._prints.begin_backward({})
        self._waiting = True
        engine = torch.autograd.Variable._execution_engine
        # DDP finishes its gradients in a callback. One that is queued by another comes after it.
        engine.queue_callback(lambda: engine.queue_callback(self._pass_ends))

    def _pass_ends(self) -> None:
        """Clipping that follows within the block is then seen."""
        self._waiting, self._ends = False, self._marks()
        self._prints.end_backward(True)
        self._all_read = self._given.read()

    def _marks(self) -> list[Any]:
        return [checks.mark(p) for p in self._all]

    @property
    def _due(self) -> bool:
        return self._seen % self.every == 0

    @contextmanager
    def microbatch(
        self,
        num_samples: int,
        *,
        tokens: int | Tensor | None = None,
        scale: float | Tensor | None = None,
    ) -> Iterator[None]:
        """One forward and one backward pass over ``num_samples`` samples of this process.

        Args:
            tokens: the number of tokens that the loss counts, in all or for each sample.
            scale: the factor of the loss after its reduction, such as 1 / A for A micro-batches.

        Raises:
            ValueError: for counts that are zero or negative.
            ObservationError: where the block holds no backward pass or more than one, or ``.grad``
                was written to between two backward passes.
        """
        num_samples = integer("num_samples", num_samples)
        loss_factors.check_factors(num_samples, tokens, scale)
        if self._inside:
            raise ObservationError(
                "A gns.microbatch block is already open. It takes one forward and backward pass."
            )
        if not self._due:
            yield
            return
        refuse_context_parallel()
        self._look()
        self._before = self._marks()
        if not self._passes:
            self._begin()
        try:
            self._prints.open(not self._passes)
        except ObservationError:
            self.discard()
            raise
        self._inside = True
        self._arrivals.start()
        try:
            yield
            if self._inside:
                self._close(num_samples, tokens, scale)
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> None:
        """Refuse what the first micro-batch of an update must not find."""
        now = trained(unwrapped(self.model))
        if [*map(id, now.values())] != [*map(id, self._all)]:
            raise ObservationError(
                "Parameters were frozen, unfrozen or replaced since the first micro-batch, so old "
                "and new measurements cannot be averaged. Call gns.reset()."
            )

    def _close(
        self, num_samples: int, tokens: int | Tensor | None, scale: float | Tensor | None
    ) -> None:
        """Keep what the pass has left."""
        self._arrivals.stop()
        own, self._own, self._inside = self._own, {}, False
        if not own:
            raise ObservationError(NO_BACKWARD)
        self._prints.close()
        for name, old, new in zip(self._parameters, self._before, self._ends):
            if self._processes.world == 1 and name not in own and new and old != new:
                raise ObservationError(
                    f"{name}.grad changed in a pass in which autograd brought it no gradient, as "
                    "by a fused kernel that adds to it. The gradient of the micro-batch is then "
                    "not known. Freeze the parameter, or switch that kernel off."
                )
        factor = loss_factors.loss_scale(self._scaler)
        self._loss_scale = None if factor is None else factor.clone()
        none = torch.zeros((), dtype=torch.float64, device=self._device)
        sqnorm_P = torch.stack([own.get(name, none).to(self._device) for name in self._parameters])
        scalars = loss_factors.microbatch_scalars(
            *(num_samples, tokens, 1.0 if scale is None else scale),
            *(self._loss_reduction, False, self._device),
        )
        scalars[6:] = torch.stack([scalars[4].square(), torch.zeros_like(none)])  # W, not U₂
        self._passes.append((loss_factors.without_scale(sqnorm_P, self._loss_scale), scalars))

    def update(self, grad_norm: float | Tensor | None = None) -> None:
        """End an optimizer update: after its last backward pass, before clipping and ``step()``.

        Args:
            grad_norm: the 2-norm of the whole gradient before clipping, as ``clip_grad_norm_``
                returns it. No gradient is read again then (but in the first update and in one of
                each hundred, to compare), and no noise scale by module is known.

        With several processes it is a collective: all of them call it.

        Raises:
            ObservationError: without a micro-batch; for an update of a single one on one process;
                where gradients are gone or were written to.
        """
        if self._inside:
            raise ObservationError(
                "gns.update() was called inside a gns.microbatch block: call it after the block"
            )
        due, self._seen = self._due, self._seen + 1
        if not due:
            return
        passes = self._passes
        if not passes:
            raise ObservationError(
                "gns.update() was called without a micro-batch. Run forward and backward inside "
                "gns.microbatch(num_samples)."
            )
        on = self._processes
        if len(passes) * on.world < 2:
            self.discard()
            raise ObservationError(
                "TwoBatchNoiseScale compares the gradients of the backward passes of an update, "
                "and this update had 1 on 1 process. Use 2 or more, better 4: accumulate gradients "
                "with a gns.microbatch block for each pass, or train with more processes. "
                "GradientNoiseScale measures a single pass."
            )
        p_P, scalars = (torch.stack(each).sum(0) for each in zip(*passes))
        still = None if loss_factors.unscaled(self._scaler) else self._loss_scale
        written = stale = another = p_P.new_zeros(())
        read = self._given.finish(grad_norm is not None, self._all_read)
        if grad_norm is None:
            q_P = self._read(still)
            q, before, after = q_P.sum(), self._prints.last.norms, self._prints.norms()
            if before is not None and after is not None:
                written = rewritten(before, after, self._loss_scale, still)
        else:
            norm = gradients.given_sqnorm(grad_norm, self._device)
            q = loss_factors.without_scale(norm, still) * on.divisor**2 / on.world
            q_P = torch.full_like(p_P, torch.nan)
            another = (q * on.world < 1e-5 * p_P.sum()).double()  # noise alone makes it about p
            if read is not None:  # all processes have the same gradients
                of_all = read.shares(self._device).sum() * on.world
                of_all = loss_factors.without_scale(of_all, self._loss_scale)
                another += another_norm(loss_factors.without_scale(norm, still), of_all)
        if self._prints.leftover is not None:
            stale = (self._prints.leftover.sum() != 0).double()
        flags = torch.stack([written, stale, another, q, q.square()])
        vector = torch.cat([p_P, q_P, q[None], scalars, flags])
        if on.world > 1:
            dist.all_reduce(vector, group=self._group)
        self._ring.append(vector)
        self._prints.finish()
        self._forget()
        if self._seen // self.every % AUDIT_EVERY == 0:
            self._given.again()

    def _read(self, loss_scale: Tensor | None) -> Tensor:
        """This process's share of the squared norm of each parameter's gradient, from ``.grad``."""
        found = gradients.grad_sqnorms(self._all, self._processes)
        if not found.indices:
            raise ObservationError(checks.GONE)
        self._prints.finish()
        self._prints.refuse_rewritten(self._scaler, True)
        q_P = found.shares(self._device)
        return loss_factors.without_scale(q_P, loss_scale) * self._processes.divisor**2

    def compute(self) -> NoiseScale:
        """The noise scale over the window, with its 95 % interval; waits for the device.

        Raises:
            ObservationError: where the gradients of an update were not those of its micro-batches.
        """
        if not self._ring:
            none = dict(drift=False, updates=0, skipped=0, samples=0, per_module={})
            return NoiseScale(**vars(NOT_MEASURED), **none)  # type: ignore[arg-type]
        K = len(self._all)
        p, q, whole, scalars, flags = (
            torch.stack([*self._ring]).cpu().split([K, K, 1, SCALARS, FLAGS], 1)
        )
        refuse_numbers(p.sum(1), whole[:, 0], scalars, flags, self._processes.world)
        modules = [name.rpartition(".")[0] for name in self._parameters]
        found = summarize(p, q, whole[:, 0], scalars, False, modules, self.decay)
        used = (p.sum(1) + whole[:, 0]).isfinite() & (scalars[:, 2] > 1)
        passes = int(scalars[used, 2].sum())
        return replace(found, covered=1.0, noise_from="micro_batches", passes=passes)

    def state_dict(self) -> dict[str, Any]:
        """All measurements, on the CPU, between updates; the same on every process."""
        if self._inside or self._passes:
            raise ObservationError(
                "gns.state_dict() was called in the middle of an update: call gns.update() first"
            )
        return {**self._identity(), "seen": self._seen, "ring": [t.cpu() for t in self._ring]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``, with the same bits as without the interruption.

        Raises:
            ValueError: for a state of another model or of other settings, naming the difference.
        """
        refuse_other(state, self._identity())
        self.reset()
        self._look()
        self._seen = state["seen"]
        self._ring.extend(t.to(self._device) for t in state["ring"])

    def _identity(self) -> dict[str, Any]:
        self._look()
        return {
            "two_batches": True,
            "parameters": list(self._parameters),
            "loss_reduction": self._loss_reduction,
            "window": self.window,
            "every": self.every,
        }

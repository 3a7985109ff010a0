# SPDX-License-Identifier: Apache-2.0
"""``TwoBatchNoiseScale``: the noise scale from gradients alone.

The unit k is one backward pass of one process, with U_k = Σ u_b over its samples. Its gradient is
that of a small batch, the sum of all units that of the large one:

    E Σ ‖g_k‖² = W |G|² + S,    E ‖Σ g_k‖² = V |G|² + S,    W = Σ U_k²,    V = (Σ U_k)²

with S = Σ u_b² v_b. These are the equations of ``noise_scale.statistics`` with W in the place of U₂
= Σ u_b², so all that follows from p and q follows from these two.
"""

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gnsfast.estimator.estimator import GradientNoiseScale


class TwoBatchNoiseScale(GradientNoiseScale):
    """Measure the gradient noise scale tr Σ / |G|² of any model, from its gradients alone. It is
    ``GradientNoiseScale(model, unit="micro_batch")``.

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
        super().__init__(
            model,
            window=window,
            decay=decay,
            every=every,
            loss_reduction=loss_reduction,
            grad_scaler=grad_scaler,
            process_group=process_group,
            unit="micro_batch",
        )

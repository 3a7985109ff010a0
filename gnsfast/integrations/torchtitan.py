# SPDX-License-Identifier: Apache-2.0
"""``measured``: a configuration of torchtitan whose training also measures the noise scale."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from gnsfast.configure import configure
from gnsfast.following import Followed, unwrapped
from gnsfast.functional import linear_cross_entropy
from gnsfast.integrations.measuring import Measuring
from gnsfast.integrations.needed import needed
from gnsfast.table import learn

with needed(__name__, "torchtitan", "torchtitan"):
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
    from torchtitan.config.override import derive
    from torchtitan.trainer import Trainer

SAMPLES = 4
"""Of so many sequences of numbers in turn the table is learnt."""


class HeadLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """A single backward pass of the head, which keeps no logits either.

    ``ChunkedLossWrapper`` runs one for each chunk of the sequence, but the norm of a sample needs
    its whole sequence at once.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        pass

    def set_lm_head(self, lm_head: Any) -> None:
        super().set_lm_head(lm_head)
        lm_head.cross_entropy = lambda hidden, labels: linear_cross_entropy(
            hidden, lm_head.weight, labels, reduction="sum"
        )
        # FSDP gathers the weight for it.
        register_fsdp_forward_method(lm_head, "cross_entropy")

    def __call__(
        self, hidden: Tensor, labels: Tensor, global_valid_tokens: Any = None, **others: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(hidden, labels, global_valid_tokens, **others)
        return self.lm_head.cross_entropy(hidden, labels) / global_valid_tokens, {}


class Measured(Measuring, Trainer):  # type: ignore[misc]
    """torchtitan's ``Trainer``, and the noise scale in its logger, beside the loss.

    An update is from the first micro-batch, before which ``train_step`` clears the gradients, to
    the last, after which it clips. The loss is a sum over tokens divided by the valid tokens of all
    processes. ``trainer.gns`` is the estimator. A run that resumes begins a new window, as a
    checkpoint of torchtitan can only be loaded into the entries that it was saved with.

    Raises:
        NotImplementedError: for CUDA graphs and pipelines.
    """

    STARTS = "trainer.train()"
    ntokens_seen: int

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        window: int = 64
        """How many updates the noise scale is a mean over."""
        budget: float = 0.02
        """The largest share of the time that measuring may take; 0 measures each update."""
        gradients: str = "torch"
        """"torch" leaves training the same to the last bit; "fused" costs less."""
        on_error: str = "skip"
        """"skip" logs an error of gnsfast and goes on training; "raise" ends the run."""
        per_module: bool = False
        """Also log the noise scale of every module."""

    def __init__(self, config: Config) -> None:
        Trainer.__init__(self, config)
        reason = None
        if not config.training.disable_cuda_graphs:
            reason = "CUDA graphs, inside which nothing is seen: training.disable_cuda_graphs=True"
        elif self.parallel_dims.pp_enabled:
            reason = "pipelines: parallelism.pipeline_parallel_degree=1"
        if reason is not None:
            raise NotImplementedError(f"gnsfast.integrations.torchtitan does not support {reason}")
        [model] = self.model_parts
        names: dict[str, Any] = {"window": config.window, "budget": config.budget or None}
        names |= {"gradients": config.gradients, "on_error": config.on_error}
        names |= {"loss_reduction": "sum", "keep_largest": 0}
        Measuring.__init__(self, config.per_module, None, None, None, None, names)
        self._start(model, None, None)
        self._left = 0  # micro-batches of the update under way
        with self._dropping_errors():
            if self._skips_head:
                configure(model, exclude=["lm_head"])
            ids = torch.arange(SAMPLES * 64, device=self.device).view(SAMPLES, 64)
            learn(model, ids, run=self._outputs).tell(Followed.of(unwrapped(model)))

    @property
    def _skips_head(self) -> bool:
        """Whether the head has several backward passes in a micro-batch."""
        loss = self.loss_fn
        return isinstance(loss, ChunkedLossWrapper) and not isinstance(loss, HeadLoss)

    def _outputs(self, ids: Tensor) -> Tensor:
        """Logits; hidden states where the head is left out."""
        seen: int = self.ntokens_seen  # which the next line counts up
        inputs, _, others = self.post_dataloading_process({"input": ids}, ids)
        self.ntokens_seen = seen
        [model] = self.model_parts
        outputs: Tensor = model(inputs, **others)
        return model.lm_head(outputs) if isinstance(self.loss_fn, HeadLoss) else outputs

    @contextmanager
    def _measured_pass(self, labels: Tensor, global_valid_tokens: Tensor) -> Iterator[None]:
        """The block of a micro-batch; that of the last one ends the update."""
        assert self.gns is not None
        self._begin_update()
        block: AbstractContextManager[None] = nullcontext()
        with self._dropping_errors():
            told: Any = {"tokens": (labels != IGNORE_INDEX).sum(1)}
            told["scale"] = 1 / global_valid_tokens
            block = self.gns.microbatch(len(labels), **told)
        with block:
            yield
        self._left -= 1
        if not self._left:
            self._end_update()

    def forward_backward_step(self, **given: Any) -> Tensor:
        with self._measured_pass(given["labels"], given["global_valid_tokens"]):
            loss: Tensor = super().forward_backward_step(**given)
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self._left = self.gradient_accumulation_steps
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            first = torch.distributed.get_rank() == 0
            found = self._found(self.step, {}, first=first)
            self.metrics_processor.logger.log(found, self.step)


def measured(config: Trainer.Config, *, head: bool = False, **options: Any) -> Measured.Config:
    """The same training, measured: ``measured(config).build().train()``.

    Args:
        config: of torchtitan, such as ``llama3_8b()``.
        head: also measure the head where torchtitan computes the loss in chunks. ``HeadLoss`` then
            takes the place of the chunks, and the loss differs in its last bits. By default the
            head is left out of the noise scale (``gns/covered``), and training keeps its bits.
        options: fields of ``Measured.Config``, which are also options of torchtitan's command line.
    """
    found: Measured.Config = derive(config, Measured.Config, **options)
    if head and isinstance(config.loss, ChunkedLossWrapper.Config):
        found.loss = derive(config.loss, HeadLoss.Config)
    return found

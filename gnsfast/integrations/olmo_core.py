# SPDX-License-Identifier: Apache-2.0
"""``GNSCallback``: the noise scale of a run of OLMo-core's Trainer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.following import Followed, unwrapped
from gnsfast.integrations.measuring import Measuring
from gnsfast.integrations.needed import needed
from gnsfast.integrations.replacing import replaced
from gnsfast.table import learn

with needed(__name__, "OLMo-core", "ai2-olmo-core"):
    from olmo_core.train.callbacks import Callback

SAMPLES = 4
"""Of so many sequences of numbers in turn the table is learnt."""

CONTEXT = "_train_microbatch_context"
"""The method of a ``TransformerTrainModule`` that stands around each micro-batch. OLMo-core has no
event for it.
"""


@dataclass
class GNSCallback(Measuring, Callback):  # type: ignore[misc]
    """Measure the noise scale of ``trainer_config.add_callback("gns", GNSCallback())``.

    An update is from OLMo-core's event ``pre_step`` to ``pre_optim_step``, before it clips, and
    each micro-batch in it is a pass. The numbers of ``trackers.metrics`` are recorded every
    ``metrics_collect_interval``, and reach OLMo-core's loggers. The measurements are saved in its
    checkpoints, and a resumed run continues them. ``callback.gns`` is the estimator.

    Args:
        window: how many updates the noise scale is a mean over.
        budget: the largest share of the time that measuring may take. None measures each update.
        gradients: ``"torch"`` leaves training the same to the last bit; ``"fused"`` costs less.
        on_error: ``"skip"`` logs an error of gnsfast and goes on training; ``"raise"`` ends it.
        per_module: also log the noise scale of every module.

    Raises:
        NotImplementedError: for another training module than ``TransformerTrainModule``.

    >>> from gnsfast.integrations.olmo_core import GNSCallback  # doctest: +SKIP
    >>> trainer_config.add_callback("gns", GNSCallback())  # doctest: +SKIP
    """

    STARTS = "trainer.fit()"

    window: int = 64
    budget: float | None = 0.02
    gradients: str = "torch"
    on_error: str = "skip"
    per_module: bool = False

    def __post_init__(self) -> None:
        names = {"window": self.window, "budget": self.budget, "gradients": self.gradients}
        names |= {"on_error": self.on_error, "loss_reduction": "sum", "keep_largest": 0}
        Measuring.__init__(self, self.per_module, None, None, None, None, names)
        self._saved: dict[str, Any] = {}
        self._batch: dict[str, Any] | None = None  # of the step under way
        self._counts: tuple[Tensor, ...] = ()  # of each micro-batch
        self._scale: Tensor | None = None
        self._undo = ExitStack()

    def pre_train(self) -> None:
        module = self.trainer.train_module
        if not hasattr(module, CONTEXT):
            raise NotImplementedError(
                f"GNSCallback does not support {type(module).__name__}, which has no "
                f"{CONTEXT}: use a TransformerTrainModule"
            )
        self._start(module.model, None, None)
        T = module.max_sequence_length
        with self._dropping_errors():
            ids = torch.arange(SAMPLES * T, device=module.device).view(SAMPLES, T)
            ids %= module.model.vocab_size
            # While it trains, the model returns its loss alone: only logits prove the norms.
            learn(module.model, ids).tell(Followed.of(unwrapped(module.model)))
            if self._saved:
                self._load(self._saved)
        measured = partial(self._microbatch, getattr(module, CONTEXT))
        self._undo.enter_context(replaced(module, **{CONTEXT: measured}))

    def pre_step(self, batch: dict[str, Any]) -> None:
        self._batch = batch

    @contextmanager
    def _microbatch(
        self, context: Callable[..., AbstractContextManager[None]], index: int, count: int
    ) -> Iterator[None]:
        """The block of a micro-batch. The trainer's dry run, before the first step, is no pass."""
        assert self.gns is not None
        block: AbstractContextManager[None] = nullcontext()
        if self._batch is not None:
            self._begin_update()
            with self._dropping_errors():
                if index == 0:
                    self._count(self._batch)
                tokens = self._counts[index]
                block = self.gns.microbatch(len(tokens), tokens=tokens, scale=self._scale)
        with context(index, count), block:
            yield

    def _count(self, batch: dict[str, Any]) -> None:
        """The tokens that the loss counts of each sample, and the factor of their summed losses."""
        module, labels = self.trainer.train_module, batch["labels"]
        counts = (labels != module.label_ignore_index).sum(1)
        total = counts.sum()
        if (kept := batch.get("instance_mask")) is not None:  # OLMo-core divides by them too
            total = total + (~kept).sum() * labels.shape[1]
        self._counts = counts.split(module.rank_microbatch_size // batch["input_ids"].shape[1])
        self._scale = 1 / total

    def pre_optim_step(self) -> None:
        self._batch = None
        self._end_update()

    def post_step(self) -> None:
        if self.step % self.trainer.metrics_collect_interval:
            return
        first = not dist.is_initialized() or dist.get_rank() == 0
        tokens = self.trainer.global_train_tokens_seen
        numbers = self._found(self.step, {}, first=first, tokens=tokens)
        for name, value in numbers.items():
            self.trainer.record_metric(name, value)

    def close(self) -> None:
        self._undo.close()

    def state_dict(self) -> dict[str, Any]:
        return self._saved if self.gns is None else self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

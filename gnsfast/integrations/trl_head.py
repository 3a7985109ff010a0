# SPDX-License-Identifier: Apache-2.0
"""Measures TRL's fused head. TRL's trainers replace the model's forward by one whose loss takes the
weight of ``lm_head`` as a tensor, so it never calls the head's module.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast import guard
from gnsfast.errors import ObservationError
from gnsfast.following import Followed, unwrapped
from gnsfast.functional import linear_cross_entropy
from gnsfast.integrations.replacing import replaced
from gnsfast.kept import kept_chance


@contextmanager
def measured_head(whole: Any, packed: Callable[[], bool]) -> Iterator[None]:
    """Route the log-probabilities of TRL's forward through the head's ``cross_entropy``.

    Equals TRL's own forward: values are TRL's to the bit, gradients those of gnsfast's operator.
    TRL still computes its metrics (entropy, accuracy) from the head's outputs, so the head takes
    five products a step instead of four. Does nothing where no forward of TRL's is bound, where the
    head is frozen (LoRA), and in passes without gradients.

    Args:
        whole: the model that is measured, which PEFT may have wrapped.
        packed: whether the pass under way is over packed documents. A head that shares its weight
            then keeps its logits, as ``cross_entropy`` has no norms for these two together.
    """
    bare = lambda: Followed.of(unwrapped(whole)).structure.bare()  # noqa: E731
    model = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    theirs, head = vars(model).get("forward"), None
    if theirs is not None and _is_of_trl(theirs):
        head = model.get_output_embeddings()
    if head is None or not head.weight.requires_grad:
        yield
        return
    with replaced(model, forward=_Forward(model, theirs, packed, bare)):
        yield


def _is_of_trl(forward: Any) -> bool:
    """Whether a forward that was bound to a model is TRL's."""
    f = getattr(forward, "__func__", forward)
    # Its ``__module__`` is that of the forward which it takes the place of.
    module: str = getattr(f, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] == "trl"


METRICS = ("entropy", "log_sum_sq_probs", "mean_logits")
"""Outputs of TRL's forward that its trainers log, and that no loss is made of."""


class _Forward:
    """TRL's forward on detached hidden states, and the log-probabilities once more with ours."""

    def __init__(
        self,
        model: Any,
        theirs: Callable[..., Any],
        packed: Callable[[], bool],
        bare: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.theirs, self.packed, self.bare = model, theirs, packed, bare
        self.__wrapped__ = theirs  # its signature, and whose forward it is
        self.is_compared = self.is_plain = False
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and torch.is_grad_enabled() and not self.is_compared:
            self._compare(args, kwargs)
        if self.is_plain or not (fused_lm_head and torch.is_grad_enabled()):
            return self.theirs(*args, fused_lm_head=fused_lm_head, **kwargs)
        log_probs, outputs = self._both(args, kwargs)
        outputs.loss = None  # its gradient is TRL's; the trainers take log_probs
        for name in METRICS:
            if isinstance(metric := getattr(outputs, name, None), Tensor):
                setattr(outputs, name, metric.detach())
        outputs.log_probs = log_probs + (outputs.log_probs - log_probs).detach()
        return outputs

    def _both(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Our log-probabilities, and what TRL makes of the detached hidden states."""
        ours: list[Tensor] = []

        def detach(module: nn.Module, args: Any, output: Any) -> Any:  # within TRL's autocast
            ours.append(self._log_probs(output.last_hidden_state, kwargs))
            output.last_hidden_state = output.last_hidden_state.detach()
            return output

        with self.model.base_model.register_forward_hook(detach):
            outputs = self.theirs(*args, fused_lm_head=True, **kwargs)
        return ours[0], outputs

    def _log_probs(self, hidden_BTD: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        head, shift = self.model.get_output_embeddings(), kwargs.get("shift_labels") is None
        labels_BT: Tensor = kwargs["labels" if shift else "shift_labels"].to(hidden_BTD.device)
        shared = head.weight is getattr(self.model.get_input_embeddings(), "weight", None)
        if shared and self.packed():
            logits = head(hidden_BTD).float()
            logits = logits if self.cap is None else self.cap * (logits / self.cap).tanh()
            if shift:
                logits, labels_BT = logits[:, :-1], labels_BT[:, 1:]
            return -F.cross_entropy(logits.mT, labels_BT, reduction="none")
        options: Any = {"reduction": "none", "softcap": self.cap, "shift": shift}
        weight, bias = head.weight, getattr(head, "bias", None)
        loss_BT = linear_cross_entropy(hidden_BTD, weight, labels_BT, bias=bias, **options)
        return -loss_BT[:, :-1] if shift else -loss_BT

    def _compare(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Run the first batch once for this alone: temperature, scales and whatever else TRL may do
        to logits show in their log-probabilities. Where ours differ, TRL's forward stays.
        """
        self.is_compared = True
        try:
            with torch.no_grad(), self.bare(), kept_chance(self.model):
                log_probs, outputs = self._both(args, kwargs)
            self._refuse_others(log_probs, outputs.log_probs)
        except Exception as error:
            if not guard.takes(error):
                raise
            self.is_plain = True

    def _refuse_others(self, ours: Tensor, theirs: Tensor) -> None:
        half = self.model.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled()
        off = float((ours - theirs).abs().mean())
        if not off <= (2e-2 if half else 1e-4) * (1.0 + float(theirs.abs().mean())):
            raise ObservationError(
                "the log-probabilities of TRL's fused head differ from those of lm_head by "
                f"{off:.3g} in the mean, so {type(self.model).__name__} changes its logits in a "
                "way that gnsfast does not know (a scale, a temperature). Leave the head out: "
                "gnsfast.configure(model, exclude=['lm_head'])"
            )

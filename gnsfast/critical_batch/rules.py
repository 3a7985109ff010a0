# SPDX-License-Identifier: Apache-2.0
"""How hyperparameters follow a batch size that grows by k: the one table of rules.

The controller, the branches, the schedules and the callbacks all read it. Every rule composes:
growing by 2 and then by 3 is growing by 6.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gnsfast.arguments import check_choice


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    ``moves`` is the argument that takes its ``name``. ``tested`` says which numbers of the paper
    the tests reproduce, or that they only repeat its formula. ``change`` depends on the argument:

    - ``"lr"``: k -> factor of the learning rate;
    - ``"betas"``: (beta1, beta2, eps, k) -> the new three;
    - ``"weight_decay"``: (k, factor of the learning rate) -> factor of the weight decay.
    """

    moves: str
    name: str
    formula: str
    source: str
    holds: str
    tested: str
    change: Callable[..., Any]


def _sde(beta1: float, beta2: float, eps: float, k: float) -> tuple[float, float, float]:
    return 1 - k * (1 - beta1), 1 - k * (1 - beta2), eps / math.sqrt(k)


FLOOR = 0.95
"""The least beta2 to which a rule moves one: marin's runs spiked below it (its pull request 2447).
"""


def _half_life(beta1: float, beta2: float, eps: float, k: float) -> tuple[float, float, float]:
    """Not below ``FLOOR``, nor below β1², where Adam's steps have no bound; a beta2 that is lower
    already stays.
    """
    return beta1, max(beta2**k, min(beta2, max(FLOOR, beta1**2))), eps


KNOWN = re.compile("adam|rmsprop|sgd", re.I)
"""Names of optimizers whose learning rate a rule of a paper moves."""

RULES = (
    Rule(
        "lr",
        "sqrt",
        "η √k",
        "Malladi et al. 2022 (arXiv 2205.10287), square root scaling rule of Adam and RMSprop; "
        "Merrill et al. 2025 (arXiv 2505.23971) for each doubling of a warm-up",
        "Adam whose gradients are mostly noise: batches below the critical one",
        "formula",
        math.sqrt,
    ),
    Rule(
        "lr",
        "linear",
        "η k",
        "Goyal et al. 2017 (arXiv 1706.02677), section 2.1",
        "SGD with momentum; ImageNet from 256 to 8,192 images",
        "0.1 at 256 images becomes 3.2 at 8,192",
        float,
    ),
    Rule("lr", "keep", "η", "", "", "", lambda k: 1.0),
    Rule("lr", "none", "η", "", "a learning rate that your own code moves", "", lambda k: 1.0),
    Rule("betas", "keep", "β1, β2", "", "", "", lambda beta1, beta2, eps, k: (beta1, beta2, eps)),
    Rule(
        "betas",
        "half_life",
        "β1, β2^k, not below 0.95 or β1²",
        "Marek et al. 2025 (arXiv 2507.07101): the half-life of β2 stays constant in tokens; the "
        "floor is that of marin, whose large batches spiked below it (pull request 2447)",
        "Adam on language models of 19M to 1.3B parameters, batches of 1 to 4,096 samples",
        "0.95 at 512 samples is 0.9999 at 1, as their configurations have it; 0.999 at 32 samples "
        "is marin's 0.998 at 64 to 0.968 at 1,024, and 0.95 at 2,048",
        _half_life,
    ),
    Rule(
        "betas",
        "sde",
        "1 - k (1 - β1), 1 - k (1 - β2), ε / √k",
        "Malladi et al. 2022 (arXiv 2205.10287), with lr='sqrt'",
        "k (1 - β) well below 1; refused beyond 1, where a beta would be negative",
        "formula",
        _sde,
    ),
    Rule("weight_decay", "keep", "λ", "", "", "", lambda k, lr_factor: 1.0),
    Rule(
        "weight_decay",
        "timescale",
        "λ k / (factor of η)",
        "Wang & Aitchison 2024 (arXiv 2405.13698) and Bergsma et al. 2025 (arXiv 2505.13738): "
        "τ = B / (η λ D) stays constant, so λ is linear in B at one η",
        "decoupled weight decay (AdamW, and SGD without momentum), batches below the critical one",
        "formula",
        lambda k, lr_factor: k / lr_factor,
    ),
)
"""Each rule with its paper, equation and range."""

NAMES = {
    moves: {rule.name: rule for rule in RULES if rule.moves == moves}
    for moves in ("lr", "betas", "weight_decay")
}
"""The rules of an argument, by name."""

MOVED = ("lr", "betas", "eps", "weight_decay")
"""What a rule may move in a parameter group."""


@dataclass(frozen=True)
class Rules:
    """One rule for each argument. Parameter groups without betas, such as Muon's, are left alone.

    Args:
        lr: ``"sqrt"`` (Adam), ``"linear"`` (SGD), ``"keep"``, or ``"none"``, which leaves it to
            your own code.
        betas: of Adam: ``"keep"``, ``"half_life"``, which keeps beta2 at 0.95 or above, or
            ``"sde"``, which moves eps too.
        weight_decay: ``"keep"``, or ``"timescale"``, which divides by the factor of the learning
            rate and so does not go with ``lr="none"``.

    A rule moves the learning rate of Adam, RMSprop and SGD and of optimizers named after them. No
    paper here says how that of another one (Muon, Lion) follows a batch: ``check`` refuses it.

    Raises:
        ValueError: for a name that no rule has, and for ``"timescale"`` with ``lr="none"``.

    >>> from gnsfast.critical_batch import Rules
    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> adamw = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    >>> Rules(betas="half_life", weight_decay="timescale").apply(adamw, 4)
    >>> group = adamw.param_groups[0]
    >>> group["lr"], round(group["betas"][1], 4), group["weight_decay"]
    (0.002, 0.9606, 0.2)
    """

    lr: str = "sqrt"
    betas: str = "keep"
    weight_decay: str = "keep"

    def __post_init__(self) -> None:
        for moves, names in NAMES.items():
            check_choice(moves, getattr(self, moves), names)
        if (self.lr, self.weight_decay) == ("none", "timescale"):
            raise ValueError(
                "weight_decay='timescale' divides by the factor of the learning rate, and lr='none'"
                " leaves that to your own code: pass lr='keep' if the learning rate stays as it "
                "is, lr='sqrt' or 'linear' if it moves so, or weight_decay='keep'"
            )

    def lr_factor(self, k: float) -> float:
        """The factor of the learning rate where the batch grows by ``k``."""
        return float(NAMES["lr"][self.lr].change(k))

    def check(self, optimizer: Optimizer, k: float) -> None:
        """Raise ValueError where an optimizer cannot follow a batch that grows by ``k``."""
        if not 0 < k < math.inf:
            raise ValueError(f"a batch must grow by a positive, finite factor, not by {k!r}")
        kind = type(optimizer).__name__
        if self.betas != "keep" and not any("betas" in g for g in optimizer.param_groups):
            raise ValueError(f"{kind} has no betas to change: pass betas='keep'")
        for group in optimizer.param_groups:
            if self.betas == "sde" and "betas" in group and min(self._betas(group, k)[:2]) < 0:
                betas = tuple(map(float, group["betas"]))
                raise ValueError(
                    f"betas='sde' does not allow a batch {k:g} times as large with {betas}, where "
                    "1 - k (1 - beta) is negative: pass betas='half_life', which has no such limit"
                )
            if self.weight_decay != "keep" and "weight_decay" not in group:
                raise ValueError(f"{kind} has no weight decay to change: pass weight_decay='keep'")
            if self.weight_decay != "keep" and group["weight_decay"] and _coupled(optimizer, group):
                raise ValueError(
                    f"weight_decay={self.weight_decay!r} needs decoupled weight decay, and {kind} "
                    "adds its weight decay to the gradient: use AdamW, or pass weight_decay='keep'"
                )
        if k != 1 and self.lr in ("sqrt", "linear") and not _known(optimizer):
            raise ValueError(
                f"no rule says how the learning rate of {kind} follows the batch (lr={self.lr!r} "
                "is known for Adam, RMSprop and SGD): pass lr='none' and move it yourself, or "
                "lr='keep'"
            )

    def floored(self, optimizer: Optimizer, k: float) -> bool:
        """Whether a batch that grows by ``k`` meets the floor of beta2, so that the way back would
        not lead to the beta2 of now.
        """
        return self.betas == "half_life" and any(
            "betas" in g and self._betas(g, k)[1] > float(g["betas"][1]) ** k * (1 + 1e-9)
            for g in optimizer.param_groups
        )

    def apply(
        self, optimizer: Optimizer, k: float, *, lr: bool = True, lr_factor: float | None = None
    ) -> None:
        """Move every parameter group of an optimizer, each from its own values, for a batch that
        grows by ``k``.

        Args:
            lr: False leaves the learning rates to the caller.
            lr_factor: the factor of the learning rates, instead of ``self.lr_factor(k)``.

        Raises:
            ValueError: where the optimizer cannot follow; then nothing has changed.
        """
        self.check(optimizer, k)
        factor = self.lr_factor(k) if lr_factor is None else lr_factor
        if lr:
            rates = [group["lr"] * factor for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates):  # groups may share a tensor
                set_lr(group, rate)
        for group in optimizer.param_groups:
            if self.betas != "keep" and "betas" in group:
                beta1, beta2, eps = self._betas(group, k)
                group["betas"] = (beta1, beta2)
                if "eps" in group:
                    group["eps"] = eps
            if self.weight_decay != "keep":
                group["weight_decay"] *= NAMES["weight_decay"][self.weight_decay].change(k, factor)

    @contextmanager
    def moved(
        self, optimizer: Optimizer, k: float, lr_factor: float, *, lr: bool = True
    ) -> Iterator[None]:
        """Move them as ``apply`` does, and put every value back after the block."""
        groups = optimizer.param_groups
        own: list[dict[str, Any]] = [{n: g[n] for n in MOVED if n in g} for g in groups]
        try:
            if lr:
                for group in groups:  # a tensor is not written in place: it could not be put back
                    group["lr"] = group["lr"] * lr_factor
            self.apply(optimizer, k, lr=False, lr_factor=lr_factor)
            yield
        finally:
            for group, saved in zip(groups, own):
                group.update(saved)

    def _betas(self, group: dict[str, Any], k: float) -> tuple[Any, Any, Any]:
        found: tuple[Any, Any, Any] = NAMES["betas"][self.betas].change(
            *group["betas"], group.get("eps", 0.0), k
        )
        return found


def _known(optimizer: Any) -> bool:
    """Whether its class, or one that it is made from or wraps, is named after a known one and not
    after Muon, whose classes often train some parameters with Adam.
    """
    names = [each.__name__ for each in type(optimizer).__mro__]
    if any("muon" in name.lower() for name in names):
        return False
    inner = getattr(optimizer, "optimizer", None)  # of accelerate and DeepSpeed
    return any(map(KNOWN.search, names)) or (inner is not None and _known(inner))


def _coupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer adds the weight decay to the gradient, and then scales or averages it.
    For optimizers of other libraries, what they say of themselves counts.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return bool(group["momentum"])
    if isinstance(optimizer, (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)):
        return True
    if isinstance(optimizer, (torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop)):
        return True
    return group.get("decoupled_weight_decay") is False


def set_lr(group: dict[str, Any], lr: Any) -> None:
    """Set the learning rate of a parameter group.

    A tensor is written in place, because a captured optimizer step reads that tensor.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr

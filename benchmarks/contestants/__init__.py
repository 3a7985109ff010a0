# SPDX-License-Identifier: Apache-2.0
"""gnsfast and its alternatives: each leaves a model's gradients, and every sample's squared
gradient norm, after one forward and backward pass.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.contestants import formulas, packages
from benchmarks.contestants.sessions import Gnsfast, Loss, Session, SingleSamples, VmapGrad

__all__ = ["ALL", "GNSFAST", "PLAIN", "Contestant", "Loss", "Session", "named"]


@dataclass(frozen=True)
class Contestant:
    """A way to per-sample norms, and its properties.

    ``session`` takes a model over, wraps or hooks it; the loss is a mean over B samples.
    ``per_sample``: "yes", or "sum only" where the original has no single samples' norms to read.
    ``needs``: modules, each with what to install for it. ``instantiates``: it holds the B
    gradients of a weight at once. ``serial``: its time is B times a sample's.
    """

    name: str
    session: Callable[[nn.Module, Loss, tuple[Tensor, ...], int], Session]
    per_sample: str = "yes"
    needs: tuple[tuple[str, str], ...] = ()
    source: str = ""
    instantiates: bool = False
    serial: bool = False

    def missing(self) -> str:
        """Empty, or why it cannot run here and what to do about it."""
        for module, requirement in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed: pip install {requirement}"
        return ""

    @property
    def version(self) -> str:
        """What runs: the installed distributions, or the paper that it was written from."""
        names = [requirement.partition("==")[0] for _, requirement in self.needs]
        return self.source or ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)


TORCH = (("torch", "torch"),)
OPACUS = (("opacus", "opacus==1.6.0"),)
# BackPACK's rule for [B, T, O] is one einsum of four operands: 1.3 times as fast with opt_einsum.
BACKPACK = (("backpack", "backpack-for-pytorch==1.7.1"), ("opt_einsum", "opt_einsum==3.4.0"))

PLAIN = Contestant("plain", Session, "", TORCH)
GNSFAST = Contestant("gnsfast", Gnsfast, needs=(("gnsfast", "gnsfast"),))
ALL = (
    PLAIN,
    GNSFAST,
    Contestant("loop of single samples", SingleSamples, needs=TORCH, serial=True),
    Contestant("torch.func vmap", VmapGrad, needs=TORCH, instantiates=True),
    Contestant("Opacus, grad samples", packages.GradSamples, needs=OPACUS, instantiates=True),
    Contestant("Opacus, ghost norms", packages.GhostNorms, needs=OPACUS),
    Contestant("BackPACK", packages.BackPack, needs=BACKPACK),
    Contestant(
        "mixed ghost norms, as FastDP",
        formulas.MixedGhostNorms,
        source="from arXiv 2205.10683, 2210.00038",
    ),
    Contestant(
        "one GEMM, as nanoGNS",
        formulas.OneGemm,
        "sum only",
        source="from arXiv 2411.00999",
        instantiates=True,
    ),
)


def named(name: str) -> Contestant:
    return {contestant.name: contestant for contestant in ALL}[name]

# SPDX-License-Identifier: Apache-2.0
"""Opacus and BackPACK, as their documentation has them used; imported when a model is prepared."""

import warnings

from benchmarks.contestants.sessions import Session, row_sqnorms


def quiet() -> None:
    """Hooks on a layer whose input needs no gradient, an embedding, work as they should."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are")


class GradSamples(Session):
    """``GradSampleModule``: hooks leave every sample's gradient at its parameter."""

    def take_over(self) -> None:
        from opacus import GradSampleModule

        quiet()
        # "sum" takes what backward brings as it is: each sample's share of the mean's gradient.
        self.wrapped = GradSampleModule(self.model, loss_reduction="sum")

    def run(self) -> None:
        self.loss_of(self.wrapped, self.batch).backward()
        for name, p in self.parameters.items():
            self._sqnorms[name] = row_sqnorms(p.grad_sample)
            p.grad_sample = None


class GhostNorms(Session):
    """The norm pass of ghost clipping: norms by Gram matrices, without the samples' gradients.

    Training privately takes a second backward pass, which no noise scale needs.
    """

    def take_over(self) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        quiet()
        self.wrapped = GradSampleModuleFastGradientClipping(self.model, loss_reduction="sum")

    def run(self) -> None:
        self.loss_of(self.wrapped, self.batch).backward()
        for name, p in self.parameters.items():
            self._sqnorms[name] = p._norm_sample.square()


class BackPack(Session):
    """``BatchL2Grad``: squared norms out of extended modules."""

    def take_over(self) -> None:
        import backpack

        quiet()
        backpack.extend(self.model)
        # The gate lists what has no norms.
        warnings.filterwarnings("ignore", message="Extension saving to batch_l2 does not have")

    def run(self) -> None:
        import backpack
        from backpack.extensions import BatchL2Grad

        with backpack.backpack(BatchL2Grad()):
            super().run()
        for name, p in self.parameters.items():
            if hasattr(p, "batch_l2"):
                self._sqnorms[name] = p.batch_l2
                del p.batch_l2

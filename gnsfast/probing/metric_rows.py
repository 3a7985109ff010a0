# SPDX-License-Identifier: Apache-2.0
"""Probe rows of squared norms under a metric, beside the Euclidean ones of a ``ProbeSlab``."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gnsfast.functional import Metric
from gnsfast.layers import Probed


class MetricRows:
    """A second probe for each of some modules, row views of one tensor per device, a row for each
    trainable parameter; and what the metric of each row is made of, at addresses that stay.
    """

    def __init__(self, modules: Mapping[str, Probed], num_samples: int) -> None:
        self.modules = modules
        self._at: dict[str, tuple[torch.device, slice]] = {}
        self.parameters: dict[torch.device, list[nn.Parameter]] = {}
        for path, module in modules.items():
            own = list(module.probed_parameters().values())
            before = self.parameters.setdefault(own[0].device, [])
            self._at[path] = own[0].device, slice(len(before), len(before) + len(own))
            before += own
        sizes = {device: len(own) for device, own in self.parameters.items()}
        self.grad = {d: torch.zeros(n, num_samples + 2, device=d) for d, n in sizes.items()}
        self.constants = {  # s and eps of each row
            d: torch.zeros(n, 2, dtype=torch.float64, device=d) for d, n in sizes.items()
        }
        zeros = {device: torch.zeros_like(grad) for device, grad in self.grad.items()}
        self._probes: dict[str, Tensor] = {}
        for path, (device, rows) in self._at.items():
            probe = self._probes[path] = zeros[device][rows].detach().requires_grad_()
            probe.grad = self.grad[device][rows]

    @property
    def probes(self) -> list[Tensor]:
        return list(self._probes.values())

    def rows(self, path: str) -> Tensor:
        """[P, B + 2]: what backward left for a module."""
        device, rows = self._at[path]
        return self.grad[device][rows]

    def open(self, moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Zero all rows and let the modules that have second ``moments`` fill theirs, with the
        constants as they are.
        """
        for grad in self.grad.values():
            grad.zero_()
        for path, probe in self._probes.items():
            probe.grad = self.rows(path)  # a refused create_graph=True has put another there
        for path, of_module in moments.items():
            device, rows = self._at[path]
            constants = self.constants[device][rows]
            self.modules[path]._metric = Metric(self._probes[path], constants, tuple(of_module))

    def sums(self, device: torch.device) -> Tensor:
        """[2], float64 on ``device``, without waiting for it: over all rows the sum of the samples'
        squared norms, and of the squared norms of their sums.
        """
        found = torch.zeros(2, dtype=torch.float64, device=device)
        for grad in self.grad.values():
            p, q = grad[:, :-2].sum(dtype=torch.float64), grad[:, -2].sum(dtype=torch.float64)
            found += torch.stack([p, q]).to(device, non_blocking=True)
        return found

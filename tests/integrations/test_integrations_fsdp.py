# SPDX-License-Identifier: Apache-2.0
"""What GNSCallback says to a Trainer under FSDP and context parallelism."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
from accelerate.utils import DistributedType
from noise_cases import ALWAYS

from gnsfast.integrations.transformers import GNSCallback, _refuse


def trainer_of(version: int = 2) -> Any:
    plugin = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    return SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type=DistributedType.FSDP, state=plugin),
        callback_handler=SimpleNamespace(callbacks=[GNSCallback(**ALWAYS)]),
        args=SimpleNamespace(n_gpu=1),
    )


@pytest.mark.parametrize("metric", ["sign", "spectral", ["adam", "sign"]])
def test_noise_scales_of_micro_batches(metric: Any) -> None:
    """No process sees a whole gradient of its own."""
    with pytest.raises(NotImplementedError, match="micro-batches under FSDP.*leave metric out"):
        _refuse(trainer_of(), metric)
    _refuse(trainer_of(), None)


def test_first_version() -> None:
    with pytest.raises(NotImplementedError, match=r"FSDP 1.*fsdp_config=\{'version': 2"):
        _refuse(trainer_of(version=1), None)


@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_split_samples(kind: str) -> None:
    trainer = trainer_of()
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1, f"{kind}_size": 2}
    trainer.accelerator.parallelism_config = SimpleNamespace(**sizes)
    with pytest.raises(NotImplementedError, match=f"'{kind}': 2.*cp_size=1, sp_size=1"):
        _refuse(trainer, None)

# SPDX-License-Identifier: Apache-2.0
"""What GNSCallback says to a Trainer under FSDP and context parallelism."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
from accelerate.utils import DistributedType

from gnsfast.integrations.transformers import GNSCallback, _refuse


def trainer_of(save_strategy: str, version: int = 2) -> Any:
    plugin = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    return SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type=DistributedType.FSDP, state=plugin),
        callback_handler=SimpleNamespace(callbacks=[GNSCallback()]),
        args=SimpleNamespace(n_gpu=1, save_strategy=save_strategy),
    )


@pytest.mark.parametrize("metric", ["sign", "spectral", ["adam", "sign"]])
def test_checkpoints_of_what_is_spread(metric: Any) -> None:
    """One process alone would wait for the others in ``state_dict`` for ever."""
    with pytest.raises(NotImplementedError, match="under FSDP with checkpoints.*='no'"):
        _refuse(trainer_of("steps"), metric)
    _refuse(trainer_of("no"), metric)


@pytest.mark.parametrize("metric", [None, "adam"])
def test_what_every_process_has(metric: Any) -> None:
    _refuse(trainer_of("steps"), metric)


def test_first_version() -> None:
    with pytest.raises(NotImplementedError, match=r"FSDP 1.*fsdp_config=\{'version': 2"):
        _refuse(trainer_of("no", version=1), None)


@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_split_samples(kind: str) -> None:
    trainer = trainer_of("no")
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1, f"{kind}_size": 2}
    trainer.accelerator.parallelism_config = SimpleNamespace(**sizes)
    with pytest.raises(NotImplementedError, match=f"'{kind}': 2.*cp_size=1, sp_size=1"):
        _refuse(trainer, None)

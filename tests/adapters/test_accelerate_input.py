"""Test what `attach` refuses for an Accelerator before any training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from scarctl.errors import UsageError
from scarctl_adapters.accelerate import attach_and_resume
from tests.adapters.accelerate_runs import Loop, forget_accelerators


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def test_nothing_prepared(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"has prepared no model .call accelerator.prepare"):
        attach_and_resume(accelerator, store=tmp_path / "store")
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="has prepared no optimizer"):
        attach_and_resume(accelerator, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fractoin": 1}, "no option 'fractoin'"),
        ({"optimizer": 1}, "optimizer comes from the Accelerator"),
        ({"extras": {"accelerate": {}}}, "the extra 'accelerate' is scarctl's own"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        attach_and_resume(Loop().accelerator, store=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_what_is_no_accelerator(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accelerator is a Linear"):
        attach_and_resume(nn.Linear(2, 2), store=tmp_path / "store")


@pytest.mark.parametrize(
    ("kind", "plugin", "said"),
    [
        (DistributedType.DEEPSPEED, None, "DEEPSPEED keeps parameters"),
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM keeps parameters"),
        (DistributedType.XLA, None, "TPUs are not supported"),
        (DistributedType.FSDP, SimpleNamespace(fsdp_version=1), "FSDP of version 1 flattens"),
    ],
)
def test_strategies(tmp_path: Path, kind: DistributedType, plugin: Any, said: str) -> None:
    accelerator = Loop().accelerator
    # The launcher would set this variable.
    shared = AcceleratorState._shared_state
    shared["distributed_type"], shared["fsdp_plugin"] = kind, plugin
    with pytest.raises(UsageError, match=said):
        attach_and_resume(accelerator, store=tmp_path / "store")


def test_a_registered_object_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    loop = Loop()

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loop.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(UsageError, match="the registered Odd has a state that cannot be saved"):
        attach_and_resume(loop.accelerator, store=tmp_path / "store")

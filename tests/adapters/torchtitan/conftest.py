"""For tests under torchtitan's Trainer, some of them in this process."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch.distributed as dist

# Not for other frameworks' tests, which take a process with a rank for one of several.
if find_spec("torchtitan") is not None:
    os.environ.setdefault("LOCAL_RANK", "0")  # of a process without torchrun
    importlib.import_module("examples.torchtitan_llama.llama")  # before anything else imports torchtitan


@pytest.fixture(scope="package", autouse=True)
def group() -> Iterator[None]:
    """End the process group at last, and undo what every Trainer does: it switches the collector off."""
    yield
    gc.enable()
    if dist.is_initialized():
        dist.destroy_process_group()

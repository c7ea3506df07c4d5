"""For tests under DeepSpeed's engine, without an accelerator, some of them in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch.distributed as dist

# Not for other frameworks' tests, which take a process with a rank for one of several.
if find_spec("deepspeed") is not None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before anything imports DeepSpeed
    os.environ.setdefault("LOCAL_RANK", "0")  # of a process without torchrun


@pytest.fixture(scope="package", autouse=True)
def group() -> Iterator[None]:
    """End the process group at last, and not before: DeepSpeed keeps the first one of a process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

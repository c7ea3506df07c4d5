"""For tests under DeepSpeed's engine, without an accelerator, some of them in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before anything imports DeepSpeed
os.environ.setdefault("LOCAL_RANK", "0")  # of a process without torchrun


@pytest.fixture(scope="package", autouse=True)
def group() -> Iterator[None]:
    """One for all: DeepSpeed keeps the first group of a process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

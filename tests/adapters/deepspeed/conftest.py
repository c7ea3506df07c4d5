"""For tests under DeepSpeed's engine, without an accelerator."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before anything imports DeepSpeed
os.environ.setdefault("LOCAL_RANK", "0")  # of a process without torchrun

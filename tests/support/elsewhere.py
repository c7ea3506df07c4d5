"""Find what is durable: what a process on another host gets, from a copy of the store and without memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from scarctl.session.resumed import Resumed
from tests.support.training import Loop


def elsewhere(store: Path, mode: str = "partial") -> tuple[Resumed, dict[str, torch.Tensor]]:
    """Return what such a process resumes, and its values. The store may be in use."""
    place = store.with_name("elsewhere")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(store, place / "store")
    (place / "arena").mkdir()
    loop = Loop(place / "store", seed=99, daemon=False, arena_dir=place / "arena")
    resumed = loop.session.resume(mode)
    state = loop.state()
    loop.session.close(seal=False)
    return resumed, state

"""Test `scarctl live recover`: remaining values that are not finite are named, with exit code 3."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import scarctl
from scarctl_adapters.torch import TorchAdapter
from tests.cli.conftest import Run


def test_optimizer_state_of_another_shape(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapter cannot put back such state."""
    monkeypatch.delattr(TorchAdapter, "restore_lost")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    ended, spoiled = threading.Event(), threading.Event()
    with scarctl.attach(
        model, optimizer, store="ckpt", interval=1_000_000, settings=scarctl.Settings(daemon=True)
    ) as session:
        session.resume()

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()

        step()
        session.checkpoint(full=True, wait=True)

        def loop() -> None:
            optimizer.state[model.weight]["mu_product"].fill_(torch.nan)
            spoiled.set()
            while not ended.is_set():
                step()
                time.sleep(0.01)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            assert spoiled.wait(20)
            done = run("live", "recover", "--lost", "weight", "--store", "ckpt", "--json", code=3)
        finally:
            ended.set()
            thread.join()
    assert [text for text in done.document["problems"] if "mu_product" in text]
    assert "mu_product" in done.stderr

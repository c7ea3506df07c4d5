"""Test that weights which a hook computes before each forward pass are right as soon as a state is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

import scarctl


def pruned(layer: nn.Linear) -> Any:
    return prune.random_unstructured(layer, "weight", amount=0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", [pruned, weight_norm])
def test_a_derived_weight_is_that_of_the_restored_parameters(tmp_path: Path, kind: Any) -> None:
    found: list[torch.Tensor] = []
    x = torch.ones(2, 4)
    for seed in (0, 1):
        torch.manual_seed(seed)
        layer = kind(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        session = scarctl.attach(layer, optimizer, store=tmp_path / "store")
        resumed = session.resume()
        if seed:
            found.append(layer.weight.detach().clone())
        else:
            layer(x).square().sum().backward()
            optimizer.step()
        assert (resumed.step, resumed.consistent) == (seed, True)
        session.close()
        layer(x)  # its hook computes the weight from the parameters of the end
        found.append(layer.weight.detach().clone())
    saved, restored, computed = found
    assert torch.equal(saved, restored)
    assert torch.equal(restored, computed)


def test_a_lost_parameter_that_is_restored_has_its_weight_again(tmp_path: Path) -> None:
    layer: Any = pruned(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with scarctl.attach(layer, optimizer, store=tmp_path / "store") as session:
        session.resume()
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        kept = layer.weight_orig.detach() * layer.weight_mask
        with torch.no_grad():
            layer.weight_orig.fill_(torch.nan)
        session.recover("weight_orig")
        assert torch.equal(layer.weight, kept)

"""Digest, keep and compare a session's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash

from scarctl.adapter import Adapter, find_adapter
from scarctl.rehearse import state


def trained(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Adapter, torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    adapter = find_adapter(model, [optimizer], **options)
    model(torch.ones(5, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    return adapter, model, optimizer


def test_equal_states_have_no_difference(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        adapter, _, _ = trained(dtype)
        count = state.keep(adapter, tmp_path / "state")
        assert count == 3 * 4 + 3  # four parameters with two slots each, three buffers
        assert state.compare(adapter, tmp_path / "state") == ()


def test_the_order_in_which_an_optimizer_holds_its_states_is_no_difference(tmp_path: Path) -> None:
    adapter, _, optimizer = trained()
    state.keep(adapter, tmp_path / "state")
    other = dict(reversed(optimizer.state.items()))
    optimizer.state.clear()
    optimizer.state.update(other)
    assert state.compare(adapter, tmp_path / "state") == ()


def test_each_difference_is_named_with_its_size(tmp_path: Path) -> None:
    extras = {"counts": {"seen": 3}, "order": {"c", "b", "a"}}
    adapter, model, optimizer = trained(extras={"own": extras})
    state.keep(adapter, tmp_path / "state")
    with torch.no_grad():
        model[0].weight[0, 0] = 2.0
        model[1].num_batches_tracked += 1
    optimizer.state[model[0].bias]["exp_avg"].neg_()
    optimizer.param_groups[0]["lr"] = 0.5
    extras["counts"]["seen"] = 4  # type: ignore[index]
    found = {one.name: one.what for one in state.compare(adapter, tmp_path / "state")}
    assert found["0.weight"].startswith("1 of 12 values, by up to")
    assert found["1.num_batches_tracked"] == "1 of 1 values, by up to 0.5 of the largest"
    assert "0.bias/exp_avg" in found
    assert found["optimizers[0].param_groups[0].lr"] == "0.5, not 0.01"
    assert found["extras.own.counts.seen"] == "4, not 3"
    assert len(found) == 5


def test_another_model_differs_by_its_tensors(tmp_path: Path) -> None:
    adapter, _, _ = trained()
    state.keep(adapter, tmp_path / "state")
    other = find_adapter(torch.nn.Sequential(torch.nn.Linear(5, 3)), [])
    found = {one.name: one.what for one in state.compare(other, tmp_path / "state") if one.tensor}
    assert "another shape" in found["0.weight"]
    assert found["1.weight"] == "is not there"


def test_digests_tell_what_has_changed() -> None:
    adapter, model, optimizer = trained()
    before = state.digests(adapter)

    def changed() -> set[str]:
        now = state.digests(adapter)
        return {name for name in now if now[name] != before[name]}

    assert changed() == set()
    torch.rand(1)
    assert changed() == {"torch"}
    with torch.no_grad():
        model[0].bias += 1
    assert changed() == {"torch", "parameters"}
    optimizer.state[model[0].bias]["exp_avg"] += 1
    model[1].running_mean += 1
    assert changed() == {"torch", "parameters", "slots", "buffers"}


def test_rates_are_named_by_their_group() -> None:
    _, _, optimizer = trained()
    assert state.rates([optimizer])["lr"] == "0.01"
    assert state.rates([optimizer, optimizer])["betas of optimizer 1, group 0"] == "(0.9, 0.999)"


def test_batches_of_any_structure_have_digests() -> None:
    def digest(value: object) -> str:
        found = xxhash.xxh3_64()
        state.feed(found, value)
        return str(found.hexdigest())

    x = torch.arange(4)
    batches = [
        x,
        x + 1,
        x.float(),
        [x],
        {"x": x},
        {"y": x},
        (x, None),
        {"x": x, "length": 3},
        "text",
        object(),
    ]
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest({"x": x.clone()}) == digest({"x": x})

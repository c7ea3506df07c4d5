"""What the adapter makes of an engine, in one process: groups, iterations, skipped steps, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import scarctl
from scarctl.adapter import find_adapter
from scarctl.errors import LayoutMismatch, UsageError
from scarctl.ops.export import ExportSettings, export

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here: `make frameworks`")

from tests.adapters.deepspeed import models


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_are_named_like_the_model_and_share_memory_with_the_master_weights(stage: int) -> None:
    engine = models.build(stage)
    adapter = find_adapter(engine, [])
    models.one_step(engine, 0, 0)
    groups = {group.name: group for group in adapter.groups()}
    named = dict(engine.module.named_parameters())
    buffers = dict(engine.module.named_buffers())
    assert groups.keys() == named.keys() | buffers.keys()
    for name, value in models.values(engine).items():
        whole, _, slot = name.partition("/")
        if whole in buffers or (slot == "weight" and named[whole].requires_grad):
            continue
        tensor = groups[whole].tensors["" if slot == "weight" else slot]
        assert torch.equal(tensor, value.flatten()), name
        assert tensor.dtype == (torch.bfloat16 if whole == "scale" else torch.float32)
    assert groups["scale"].frozen
    groups["inner.bias"].tensors[""].fill_(2.5)
    assert torch.equal(models.values(engine)["inner.bias"], torch.full((7,), 2.5))
    assert all(a is b for a, b in zip(adapter.groups(), adapter.groups(), strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_iteration_is_a_step_that_changes_the_master_weights(stage: int) -> None:
    """Not a micro-batch, and not a step that the loss scaler skips. `before` comes before any change."""
    engine = models.build(stage, "fp16", accumulation=2)
    adapter = find_adapter(engine, [])
    seen: list[str] = []
    master = engine.optimizer.fp32_partitioned_groups_flat if stage == 3 else None
    master = master or engine.optimizer.single_partition_of_fp32_groups
    at_first = [flat.detach().clone() for flat in master]

    def before() -> None:
        seen.append("before")
        assert len(seen) > 2 or all(map(torch.equal, master, at_first))

    remove = adapter.install(before, lambda: seen.append(f"after {engine.micro_steps}"))
    models.one_step(engine, 0, 0)
    assert seen == ["before", "after 2"]
    for _ in range(2):
        loss = engine(models.batch(1)).float().sum() * torch.inf
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == 1
    assert seen == ["before", "after 2"]
    models.one_step(engine, 2, 0)
    assert seen == ["before", "after 2", "before", "after 6"]
    remove()
    models.one_step(engine, 3, 0)
    assert len(seen) == 4
    assert "step" not in vars(engine)
    assert "_optimizer_step" not in vars(engine.optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_in_fp16_comes_back_with_its_loss_scale(tmp_path: Path, stage: int) -> None:
    """After steps that were skipped, and with a scale that has grown: bit for bit like a run that was not stopped."""

    def train(store: Path, until: int) -> dict[str, str]:
        engine = models.build(stage, "fp16")
        torch.manual_seed(5)
        position = {"batch": 0}
        with scarctl.attach(engine, store=store, extras={"position": position}) as session:
            resumed = session.resume()
            while session.head_step < until:
                number = position["batch"]
                position["batch"] += 1
                loss = engine(models.batch(number)).float().square().mean()
                engine.backward(loss * torch.inf if number in (1, 6) else loss)
                engine.step()
            assert session.resumed.consistent, resumed.reasons
        assert position["batch"] == until + engine.skipped_steps
        return models.digests(engine)

    whole = train(tmp_path / "whole", 9)
    assert train(tmp_path / "halves", 5) != whole
    assert train(tmp_path / "halves", 9) == whole


@pytest.mark.parametrize("stage", [1, 3])
def test_exported_weights_load_into_the_model(tmp_path: Path, stage: int) -> None:
    """The master weights, in the shapes of the model's parameters, under all names."""
    engine = models.build(stage)
    with scarctl.attach(engine, store=tmp_path / "store") as session:
        session.resume()
        models.one_step(engine, 0, 0)
    settings = ExportSettings(store=str(tmp_path / "store"), output=tmp_path / "w.safetensors", weights=True)
    assert not export(settings).problems
    fresh = models.Net(5)
    fresh.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=True)
    found = dict(fresh.named_parameters())
    for name, value in models.values(engine).items():
        if name in found:
            assert torch.equal(found[name], value), name
    assert fresh.last.weight is fresh.table.weight


def test_another_optimizer_or_width_is_refused(tmp_path: Path) -> None:
    engine = models.build(2)
    with scarctl.attach(engine, store=tmp_path) as session:
        session.resume()
        models.one_step(engine, 0, 0)
    for other in (models.build(2, optimizer=torch.optim.SGD), models.build(2, width=6)):
        session = scarctl.attach(other, store=tmp_path)
        with session, pytest.raises(LayoutMismatch):
            session.resume()


class Rowwise(torch.optim.AdamW):
    """Keeps a number for every other element."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["halves"] = torch.zeros(parameter.numel() // 2)
        return result


def test_state_of_another_shape_is_refused_at_the_first_step(tmp_path: Path) -> None:
    engine = models.build(2, optimizer=Rowwise)
    with (
        pytest.raises(UsageError, match="'halves', which is neither"),
        scarctl.attach(engine, store=tmp_path),
    ):
        models.one_step(engine, 0, 0)


CLIENT = {"also": {"zero_force_ds_cpu_optimizer": False}}
REFUSED: dict[str, dict[str, Any]] = {
    "offload_param to cpu cannot be saved": {"stage": 3, "offload_param": {"device": "cpu"}, **CLIENT},
    "is a BF16_Optimizer, not": {"stage": 1, "also": {"data_types": {"grad_accum_dtype": "fp32"}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_state_elsewhere_is_refused(message: str) -> None:
    """At attach, and with what to do instead."""
    with pytest.raises(UsageError, match=message) as refused:
        find_adapter(models.build(**REFUSED[message]), [])
    assert "leave" in str(refused.value.hint)


def test_what_is_not_zero_is_refused() -> None:
    """With what stands in the way, and what to do."""
    engine = models.build(0, "fp32")
    with pytest.raises(UsageError, match="not ZeRO's of stage 1, 2 or 3"):
        find_adapter(engine, [])
    other = torch.optim.SGD(engine.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="not an optimizer of this engine"):
        find_adapter(models.build(1), [other])
    with pytest.raises(UsageError, match="leave scaler out"):
        find_adapter(models.build(1), [], scaler=torch.amp.GradScaler("cpu"))

"""Test which objects of a torch training become groups and which become extras, and that both are the whole state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from scarctl.errors import UsageError
from scarctl_adapters.torch import TorchAdapter
from scarctl_adapters.torch.optimizer_state import update_group

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=3),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(8, 6)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def test_tied_parameters_are_one_group_under_the_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.alias = nn.Parameter(torch.empty(0))
            self.alias.data = self.embed.weight.data  # another Parameter over the same memory

    model = Tied()
    adapter = TorchAdapter.build(model, [torch.optim.Adam(model.parameters())])
    assert [g.name for g in adapter.groups()] == ["alias"]


def test_activation_checkpointing_does_not_rename() -> None:
    """As in the model's own state_dict(), so that a run may switch it."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = nn.Sequential(checkpoint_wrapper(plain[0]), checkpoint_wrapper(plain[1]))
    adapters = [
        TorchAdapter.build(model, [torch.optim.SGD(model.parameters())]) for model in (plain, wrapped)
    ]
    one, other = ([group.name for group in adapter.groups()] for adapter in adapters)
    assert one == other
    assert set(one) == set(wrapped.state_dict())


def test_frozen_parameters_have_no_slots_and_unused_ones_get_theirs_in_advance() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    model["used"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    slots = {g.name: list(g.tensors) for g in TorchAdapter.build(model, [optimizer]).groups()}
    assert slots["used.weight"] == slots["unused.weight"] == ["", "exp_avg", "exp_avg_sq"]
    assert slots["frozen.weight"] == [""]
    assert not optimizer.state[model["unused"].weight], "the optimizer's own state is not touched"


def test_embeddings_with_sparse_gradients_are_tables_unless_they_are_frozen() -> None:
    made = {"sparse": nn.Embedding(9, 4, sparse=True), "dense": nn.Embedding(9, 4), "layer": nn.Linear(9, 4)}
    made |= {
        "frozen": nn.Embedding(9, 4, sparse=True).requires_grad_(False),
        "bag": nn.EmbeddingBag(9, 4, sparse=True),
    }
    model = nn.ModuleDict(made)
    groups = TorchAdapter.build(model, [torch.optim.SGD(model.parameters(), lr=0.1)]).groups()
    assert [g.name for g in groups if g.is_table] == ["sparse.weight", "bag.weight"]


def test_buffers_that_the_module_rebuilds_itself_are_left_out() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    kinds = {g.name: g.kind for g in TorchAdapter.build(model, []).groups()}
    assert kinds == {
        "weight": "parameter",
        "bias": "parameter",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "buffer",
    }


def test_parameters_that_only_an_optimizer_knows_are_groups_too() -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    assert [g.name for g in TorchAdapter.build(model, [optimizer]).groups()] == [
        "weight",
        "bias",
        "optimizer0.param2",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizers": ["adam"]}, "not a torch.optim.Optimizer"),
        ({"extras": {"position": 7}}, "has no state_dict"),
        ({"schedulers": [object()]}, "scheduler0 is a object"),
    ],
)
def test_objects_that_are_not_what_they_should_be(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"optimizers": [], **change}
    with pytest.raises(UsageError, match=message):
        TorchAdapter.build(nn.Linear(1, 1), arguments.pop("optimizers"), **arguments)  # type: ignore[arg-type]


def test_resuming_with_other_extras_is_refused() -> None:
    model = nn.Linear(1, 1)
    adapter = TorchAdapter.build(model, [], extras={"loader": {"batch": 3}})
    state = adapter.capture()
    with pytest.raises(UsageError, match=r"the store has the extras \['loader'\]"):
        TorchAdapter.build(model, []).restore(state)


@pytest.mark.parametrize("named", [True, False])
def test_a_step_begins_when_its_closure_has_returned(named: bool) -> None:
    """Forward and backward passes in a closure are not part of the step; a foreign optimizer may step before it."""

    class Own(torch.optim.SGD):
        pass

    for kind, expected in ((torch.optim.SGD, ["closure", "before"]), (Own, ["before", "closure"])):
        model, calls = nn.Linear(2, 2), []  # type: ignore[var-annotated]
        optimizer = kind(model.parameters(), lr=0.1)
        adapter = TorchAdapter.build(model, [optimizer])
        weight = model.weight.detach().clone()

        def before() -> None:
            assert torch.equal(model.weight, weight)  # noqa: B023
            calls.append("before")  # noqa: B023

        remove = adapter.install(before, None)

        def closure() -> torch.Tensor:
            calls.append("closure")  # noqa: B023
            loss = model(torch.ones(1, 2)).sum()  # noqa: B023
            loss.backward()
            return loss  # type: ignore[no-any-return]

        result = optimizer.step(closure=closure) if named else optimizer.step(closure)
        remove()
        assert calls == expected
        assert isinstance(result, torch.Tensor)
        assert not torch.equal(model.weight, weight)


def test_values_of_a_group_go_where_the_old_ones_are() -> None:
    group = {"lr": torch.tensor(0.1, device="meta"), "betas": (0.9, 0.99)}
    update_group(group, {"lr": torch.tensor(0.2), "betas": (0.8, 0.9), "initial_lr": torch.tensor(0.3)})
    assert group["lr"].device.type == "meta"  # type: ignore[attr-defined]
    assert (group["betas"], group["initial_lr"].item()) == ((0.8, 0.9), pytest.approx(0.3))  # type: ignore[attr-defined]

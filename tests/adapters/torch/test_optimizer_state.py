"""Test that optimizers' state outside slots is restored, refused at the first step, or reported."""

from __future__ import annotations

import contextlib
import random
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl.ops.survey import survey
from scarctl.session.session import Session
from scarctl.store import Store
from tests.support.training import drain


class Base(torch.optim.Optimizer):
    """An optimizer that steps against the gradient; `keep` determines its additional state."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **settings})
        self.begin()

    def begin(self) -> None:
        pass

    def keep(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        scale = self.keep()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * scale)


class Helper:
    def __init__(self) -> None:
        self.seen = 0


class Counts(Base):
    """An optimizer whose additional state is not in its `state_dict`."""

    def begin(self) -> None:
        self.count, self.helper, self.recent = 0, Helper(), deque([0.0], maxlen=3)
        self.generator, self.average = torch.Generator(), torch.zeros(3)

    def keep(self) -> float:
        self.count += 1
        self.helper.seen += self.count
        self.recent.append(self.count / 10)
        self.average.data += 0.1
        drawn = torch.rand((), generator=self.generator).item()
        return self.count + self.helper.seen + sum(self.recent) + float(self.average.sum()) + drawn


class ByAddress(Base):
    """An optimizer whose state has texts and addresses as keys."""

    def keep(self) -> float:
        self.state["k"] = self.state.get("k", torch.zeros(())) + 1  # type: ignore[index, call-overload]
        for parameter in self.param_groups[0]["params"]:
            state: Any = self.state[id(parameter)]  # type: ignore[index]
            state["factor"] = state.get("factor", 0) + 1
        return float(self.state["k"] + state["factor"]) / 100  # type: ignore[index]


class Nested(Base):
    """An optimizer whose state of one parameter refers to others, and is stored column by column."""

    def keep(self) -> float:
        first, second = self.param_groups[0]["params"]
        kept = self.state[first].setdefault(
            "kept", [torch.rand(3, 4).T, second, None, {"a": (1, deque([2]))}]
        )
        assert kept[0].stride() == (1, 4)
        assert kept[1] is second
        kept[3]["a"][1][0] += 1
        return float(kept[0].sum()) / 100 * kept[3]["a"][1][0]


class MadeAtOnce(Base):
    """An optimizer that has some state from the start, and gets more in the first step."""

    def begin(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                self.state[parameter]["mask"] = torch.rand_like(parameter) > 0.5

    def keep(self) -> float:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["mean"] = state.get("mean", torch.zeros_like(parameter)) + parameter.grad
            parameter.grad.add_(state["mean"])
        return 1.0


class Wraps(Base):
    def begin(self) -> None:
        self.inner = torch.optim.Adam(self.param_groups, lr=0.01)

    def keep(self) -> float:
        self.inner.step()
        return 0.5


class Shares(Wraps):
    def begin(self) -> None:
        super().begin()
        self.state = self.inner.state


class CallsItsParent(Wraps):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)


def _train(kind: Any, store: Path | None, steps: int, model: nn.Module | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 3)
    optimizer = kind(model.parameters(), **settings)
    session: Session | None = None
    start = 0
    if store is not None:
        session = scarctl.attach(
            model, optimizer, store=store, settings=scarctl.Settings(daemon=False), interval=1
        )
        resumed = session.resume()
        assert resumed.consistent
        start = resumed.step
    with session or contextlib.nullcontext():
        for _ in range(start, steps):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).square().sum().backward()
            optimizer.step()
    if session is not None:
        assert session.head_step == steps
        assert session.stats.errors == 0
    return [p.detach().clone() for p in model.parameters()], session


@pytest.mark.parametrize("kind", [Counts, ByAddress, Nested, MadeAtOnce, Wraps, Shares, CallsItsParent])
def test_all_of_it_comes_back(kind: Any, tmp_path: Path) -> None:
    kind(nn.Linear(2, 2).parameters())  # torch now wraps the steps of all its classes
    whole, _ = _train(kind, None, 7)
    _train(kind, tmp_path / "s", 4)
    again, _ = _train(kind, tmp_path / "s", 7)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_parameters_over_one_memory_keep_the_momentum_of_both(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        model.twin = nn.Parameter(model.weight.data)
        model.register_forward_hook(lambda m, a, out: out + a[0] @ m.twin)
        return model

    kind = torch.optim.Adam
    whole, _ = _train(kind, None, 7, tied())
    _train(kind, tmp_path / "s", 4, tied())
    again, _ = _train(kind, tmp_path / "s", 7, tied())
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


class KeepsObjects(Base):
    def keep(self) -> float:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = Helper()
        return 1.0


def test_what_can_never_be_saved_raises_at_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="KeepsObjects cannot be saved: 'projector' of a parameter is a Helper"
    ):
        _train(KeepsObjects, tmp_path / "s", 1)


class Replaces(Base):
    def begin(self) -> None:
        self.helpers: list[Helper] = []

    def keep(self) -> float:
        self.helpers.append(Helper())
        return 1.0


def test_an_attribute_that_cannot_be_saved_is_said(tmp_path: Path) -> None:
    _, session = _train(Replaces, tmp_path / "s", 3)
    (caveat,) = session.caveats
    store = Store.open(tmp_path / "s")
    assert survey(store, None).caveats == (caveat,)
    store.close()
    assert caveat.kind == "optimizer-attribute"
    assert "helpers" in caveat.message


def test_constant_settings_need_not_be_saved(tmp_path: Path) -> None:
    _train(Base, tmp_path / "s", 3, dtype=torch.float32, cls=Helper, rule=len)
    _train(Base, tmp_path / "s", 5, dtype=torch.float32, cls=Helper, rule=len)


def test_settings_that_change_and_cannot_be_saved_raise(tmp_path: Path) -> None:
    class Changes(Base):
        def keep(self) -> float:
            self.param_groups[0]["helper"] = Helper()
            return 1.0

    with pytest.raises(UsageError, match="'helper', a Helper that has changed"):
        _train(Changes, tmp_path / "s", 1)


def test_an_expanded_buffer_comes_back(tmp_path: Path) -> None:
    for value in (3.0, 5.0):
        model = nn.Linear(4, 3)
        model.register_buffer("scale", torch.full((1,), value).expand(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scarctl.attach(
            model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False)
        ) as session:
            if session.resume().step == 0:
                model(torch.rand(2, 4)).sum().backward()
                optimizer.step()
    assert model.scale.tolist() == [3.0] * 5


Point = namedtuple("Point", "x y")


def test_generators_and_other_containers_are_extras(tmp_path: Path) -> None:
    def extras() -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(1),
            "python": random.Random(2),
            "dict": {
                "recent": deque([1], maxlen=2),
                "at": Point(0, 0),
                "size": torch.Size([0]),
                "turned": None,
            },
        }

    def draw(kept: dict[str, Any]) -> list[float]:
        return [torch.rand((), generator=kept["torch"]).item(), kept["python"].random()]

    first, second = extras(), extras()
    draw(first)
    turned = torch.rand(3, 4).T
    first["dict"] |= {
        "recent": deque([5, 6], maxlen=2),
        "at": Point(1, 2),
        "size": torch.Size([3, 4]),
        "turned": turned,
    }
    for kept in (first, second):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scarctl.attach(
            model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False), extras=kept
        ) as session:
            if session.resume().step == 0:
                model(torch.rand(2, 4)).sum().backward()
                optimizer.step()
    back = second["dict"]
    assert torch.equal(back.pop("turned"), first["dict"].pop("turned"))
    assert back == first["dict"]
    assert (type(back["at"]), type(back["size"]), back["recent"].maxlen) == (Point, torch.Size, 2)
    assert draw(second) == draw(first)


def _nested() -> nn.Module:
    model = nn.Linear(2, 2)
    parts = [torch.rand(2), torch.rand(3)]
    model.weight = nn.Parameter(torch.nested.nested_tensor(parts, layout=torch.jagged))
    return model


def _sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_sparse, "weight has the layout torch.sparse_coo"),
        (_nested, "weight is a NestedTensor"),
        (lambda: nn.LazyLinear(3), "weight has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    ],
)
def test_what_lies_nowhere_in_memory_is_refused(
    model: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    made = model()
    with pytest.raises(UsageError, match=message):
        scarctl.attach(
            made,
            torch.optim.SGD(made.parameters()),
            store=tmp_path / "s",
            settings=scarctl.Settings(daemon=False),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extras": [1]}, "extras is not a dict"),
        ({"extras": {1: {}}}, "extras is not a dict"),
        ({"store": 5}, "store is 5, not a folder"),
        ({"arena_dir": 5}, "arena_dir is 5, not a folder"),
        ({"ranks": scarctl.Ranks(replicated=[1])}, "replicated is not a list of patterns"),  # type: ignore[list-item]
        ({"ranks": 2}, "ranks is 2"),
        ({"hooks": "x"}, "hooks is 'x'"),
        ({"partitioning": {"shards": 2}}, "partitioning is {'shards': 2}"),
        ({"selection": "full"}, "selection is 'full'"),
    ],
)
def test_arguments_that_are_none_are_refused_by_name(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    given: dict[str, Any] = {"store": tmp_path / "s", "daemon": False, **arguments}
    with pytest.raises(UsageError, match=message):
        scarctl.attach(model, torch.optim.SGD(model.parameters()), **grouped(**given))


def test_another_models_optimizer_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match="no optimizer has a parameter of this model"):
        scarctl.attach(
            nn.Linear(2, 2), optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False)
        )


@pytest.mark.parametrize("moved", ["reversed", "removed", "regrouped", "added"])
def test_parameters_that_are_moved_within_param_groups_are_refused(
    moved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step counts are saved by number: a resumed run would give each parameter another one's."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    settings = scarctl.Settings(daemon=False)

    def attached() -> tuple[torch.optim.Adam, Session]:
        optimizer = torch.optim.Adam(
            [{"params": [*model[0].parameters()]}, {"params": [*model[1:].parameters()]}]
        )
        selection = scarctl.Selection(policy="full")
        options: Any = {"store": tmp_path / "s", "settings": settings, "interval": 1, "selection": selection}
        return optimizer, scarctl.attach(model, optimizer, **options)

    def train(optimizer: torch.optim.Adam, steps: int) -> None:
        for n in range(steps):
            session._saving.finish()
            drain(session)
            optimizer.zero_grad()
            layers = list(model)[: 3 - n % 2]  # the last one has fewer steps
            sum(layer(torch.rand(2, 4)).square().sum() for layer in layers).backward()
            optimizer.step()

    optimizer, session = attached()
    train(optimizer, 3)
    session.checkpoint(full=True, wait=True)  # the third step is saved whole before anything moves
    first, second = (group["params"] for group in optimizer.param_groups)
    if moved == "reversed":
        second.reverse()
    elif moved == "removed":
        first.pop()
    elif moved == "added":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    else:
        second.insert(0, first.pop())
    train(optimizer, 2)
    session.close()
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    what = "Adam has other param_groups" if moved == "added" else "moved within the param_groups of Adam"
    assert any(what in text for text in said)
    optimizer, session = attached()
    with session:
        assert session.resume().step == 3
        counts = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    assert counts == [3] * 4 + [2] * 2


def test_torch_may_swap_parameters_while_a_session_is_open(tmp_path: Path) -> None:
    """torch moves sharded parameters, and with this switch all, by a swap, which a weak reference to one forbids."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    settings = scarctl.Settings(daemon=False)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with scarctl.attach(model, optimizer, store=tmp_path / "s", settings=settings, interval=1) as session:
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                model.to("cpu")
            session.checkpoint(full=True, wait=True)
            assert not session.stats.last_error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

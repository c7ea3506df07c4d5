"""Test that training in another way than the saved one is reported, and that signals still end the process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import scarctl
import scarctl.session.departure
from scarctl.checkpoint.pace import KIND as SELDOM
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.support.process import Forked, Tell
from tests.support.training import drained


class Loop:
    """A model, Adam, and backward passes."""

    def __init__(self, store: Path, depth: int = 0, **options: object) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(depth)]
        self.model: Any = nn.Sequential(*layers) if depth else nn.Linear(4, 4)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters())
        self.session = scarctl.attach(
            self.model, self.optimizer, store=store, interval=1, **grouped(daemon=False, **options)
        )
        self.session.resume()

    def backward(self) -> None:
        self.model.zero_grad()
        self.model(torch.rand(2, 4)).square().sum().backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    def kinds(self) -> list[str]:
        """Return the kinds of caveats. Checkpoints are seldom here because tests allow nearly no overhead."""
        return [caveat.kind for caveat in self.session.caveats if caveat.kind != SELDOM]


def test_an_optimizer_that_takes_over_is_said_at_its_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path / "s")
    loop.train(3)
    assert not loop.kinds()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.train(1)
    assert loop.kinds() == ["other-optimizer"]
    assert "AdamW" in caplog.text
    loop.train(2)
    loop.session.close()
    again = Loop(tmp_path / "s")
    assert again.session.resumed is not None
    assert not again.session.resumed.exact
    again.session.close()


@pytest.mark.leaves_arena
def test_other_parameters_in_the_model_are_said(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s")
    loop.train(2)
    loop.model.weight = nn.Parameter(torch.rand(4, 4))
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.train(1)
    assert loop.kinds() == ["other-optimizer"]
    loop.session.close()


def test_another_model_is_said(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s")
    loop.train(2)
    loop.model = nn.Linear(4, 4)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.train(100)
    assert loop.kinds() == ["other-training"]
    loop.session.close()


@pytest.mark.leaves_arena
@pytest.mark.parametrize("hooks", ["auto", "begin"])
def test_sigterm_ends_the_process_whatever_trains(
    tmp_path: Path, hooks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scarctl.session.departure, "FLUSH_SECONDS", 0.5)

    def trains(tell: Tell) -> None:
        loop = Loop(tmp_path / "s", hooks=hooks)
        loop.train(2)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters())
        for step in range(10**9):
            loop.train(1)
            if step == 20:
                tell("there")

    with Forked(trains) as child:
        child.expect("there")
        child.signal(signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM


@pytest.mark.leaves_arena
def test_steps_within_the_grace_period_are_steps(tmp_path: Path) -> None:
    """They are not saved: the step before the signal is on its way to the store."""

    def trains(tell: Tell) -> None:
        loop, trained = Loop(tmp_path / "s", grace="100s"), threading.Event()
        loop.train(2)
        saver = loop.session._saver
        evacuate = saver.evacuate
        saver.evacuate = lambda *given: (trained.wait(60), evacuate(*given))[1]  # type: ignore[method-assign]
        tell("there")
        while not loop.session._saving.doomed:
            loop.train(1)
        loop.train(60)
        tell(f"said {loop.kinds()}")
        trained.set()
        threading.Event().wait(100)

    with Forked(trains) as child:
        child.expect("there")
        child.signal(signal.SIGTERM)
        child.expect("said []")
        assert child.wait(60) == -signal.SIGTERM


def _by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.01 * parameter.grad


@pytest.mark.parametrize("steps", [3, 30])
@pytest.mark.parametrize("before", [0, 3])
def test_updates_by_hand_are_said(tmp_path: Path, before: int, steps: int) -> None:
    loop = Loop(tmp_path / "s")
    loop.train(before)
    for _ in range(steps):
        loop.backward()
        _by_hand(loop)
    if steps == 3:
        loop.session.close()  # the session compares once more
    assert loop.kinds() == ["no-step"]
    loop.session.close()


def test_updates_by_hand_are_said_when_the_parameters_that_count_passes_are_frozen(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s", depth=4)
    loop.train(6)  # two of the eight parameters are enough by now
    assert len(loop.session._watch._counting) == 2  # type: ignore[attr-defined]
    for parameter in (*loop.model[0].parameters(), *loop.model[-1].parameters()):
        parameter.requires_grad_(False)
    loop.train(1)
    for _ in range(30):
        loop.backward()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                if parameter.requires_grad:
                    parameter -= 0.01 * parameter.grad
    assert loop.kinds() == ["no-step"]
    loop.session.close()


def test_an_optimizer_within_the_backward_pass_is_said(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s")
    for parameter in loop.model.parameters():

        def step(p: torch.Tensor) -> None:
            with torch.no_grad():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(30):
        loop.backward()
    assert loop.kinds() == ["no-step"]
    loop.session.close()


class InBackward:
    """A loop with one optimizer for each parameter, which steps as soon as the parameter has its gradient."""

    def __init__(self, store: Path, *, backwards: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizers = {p: torch.optim.Adam([p], 0.1) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)
        given = list(self.optimizers.values())
        self.session = scarctl.attach(
            self.model,
            given[::-1] if backwards else given,
            store=store,
            interval=1,
            fraction=1.0,
            settings=scarctl.Settings(daemon=False),
            **options,
        )
        self.resumed = self.session.resume()

    def step(self, parameter: torch.Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def train(self, until: int, *, stepping: bool = False) -> None:
        for x in self.session.batches(torch.rand(9, 3, 4, generator=torch.Generator().manual_seed(1))):
            self.model(x).square().sum().backward()
            if stepping:
                self.session.step()
            if self.session.head_step == until:
                break

    def values(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.detach().ravel().tolist()]


@pytest.mark.leaves_arena
def test_optimizers_within_the_backward_pass_in_another_order_are_said_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = InBackward(tmp_path / "s", backwards=False)
    loop.train(2)
    assert "steps-in-backward" in [caveat.kind for caveat in loop.session.caveats]
    assert "in the order in which they step" in caplog.text
    drained([loop.session])  # a seal that was not read keeps its copies, so that no later ones are made
    loop.train(4)
    loop.session.close()
    found = survey(Store.open(tmp_path / "s"), None)
    assert "steps-in-backward" in [caveat.kind for caveat in found.caveats]


@pytest.mark.parametrize("hooks", ["auto", "off"])
def test_optimizers_within_the_backward_pass_resume_exactly(tmp_path: Path, hooks: str) -> None:
    stepping = hooks == "off"
    undisturbed = InBackward(tmp_path / "u", hooks=hooks, backwards=not stepping)
    undisturbed.train(9, stepping=stepping)
    undisturbed.session.close()
    first = InBackward(tmp_path / "s", hooks=hooks, backwards=not stepping)
    first.train(5, stepping=stepping)
    first.session.close()
    second = InBackward(tmp_path / "s", hooks=hooks, backwards=not stepping)
    assert (second.resumed.step, second.resumed.exact, second.resumed.reasons) == (5, True, ())
    second.train(9, stepping=stepping)
    assert second.values() == undisturbed.values()
    assert second.session.resumed.exact
    second.session.close()


class Around(torch.optim.Optimizer):
    """An optimizer like SAM: two steps of its own, and an inner optimizer."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})  # type: ignore[arg-type]
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def second_step(self) -> None:
        self.inner.step()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_steps_of_the_inner_optimizer_alone_are_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = Around(model.parameters())
    session = scarctl.attach(model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False))
    session.resume()
    model(torch.rand(2, 4)).sum().backward()
    optimizer.second_step()
    assert [caveat.kind for caveat in session.caveats] == ["no-step"]
    optimizer.step()
    assert not list(session.caveats)
    session.close()


def test_without_hooks_a_step_may_be_anything(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = Around(model.parameters())
    session = scarctl.attach(
        model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False), hooks="off"
    )
    session.resume()
    for _ in range(3):
        model.zero_grad()
        model(torch.rand(2, 4)).sum().backward()
        optimizer.second_step()
        session.step()
    session.close()
    assert not list(session.caveats)
    slots = {slot for group in session.adapter.groups() for slot in group.tensors}
    assert slots == {"", "inner.momentum_buffer"}


@pytest.mark.parametrize("passes", [1, 2, 50])
def test_accumulated_gradients_and_disturbed_parameters_are_nothing(tmp_path: Path, passes: int) -> None:
    loop = Loop(tmp_path / "s")
    for _ in range(4):
        for number in range(passes):
            loop.backward()
            if passes == 2:  # as SAM does by hand
                with torch.no_grad():
                    loop.model.weight.add_(1 if number else -1)
        loop.optimizer.step()
    assert not loop.kinds()
    loop.session.close()
    assert not loop.kinds()


def test_an_optimizer_of_other_parameters_is_no_other_optimizer(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s")
    other = nn.Linear(2, 2)
    critic = torch.optim.Adam(other.parameters())
    for _ in range(20):
        for _ in range(5):
            other(torch.rand(2, 2)).sum().backward()
            critic.step()
        loop.train(1)
        drained([loop.session])  # on a busy machine the store would be reported as behind
    assert loop.kinds() == ["outside-module"]  # the parameters that it trains are not saved
    loop.session.close()


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    # Sessions that other tests abandon, as a killed process does, have left their handlers.
    before = set(_global_optimizer_pre_hooks), set(_global_optimizer_post_hooks)
    loop = Loop(tmp_path / "s")
    assert set(_global_optimizer_post_hooks) > before[1]
    loop.train(2)
    loop.session.close()
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())
    assert (set(_global_optimizer_pre_hooks), set(_global_optimizer_post_hooks)) == before


def test_a_step_beside_the_hooks_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "s")
    loop.train(1)
    with pytest.raises(UsageError, match="twice"):
        loop.session.step()
    assert loop.session.head_step == 1
    loop.session.close()


@pytest.mark.leaves_arena
def test_sigterm_with_on_error_raise(tmp_path: Path) -> None:
    def trains(tell: Tell) -> None:
        loop = Loop(tmp_path / "s", on_error="raise")
        loop.train(2)
        loop.model.weight = nn.Parameter(torch.rand(4, 4))
        loop.optimizer = torch.optim.AdamW(loop.model.parameters())
        logging.getLogger("scarctl").setLevel(logging.CRITICAL)
        for step in range(10**9):
            loop.train(1)
            if step == 20:
                tell(str(os.getpid()))
                tell("there")

    with Forked(trains) as child:
        child.expect("there")
        child.signal(signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM


class Centres(nn.Module):
    """A criterion with trained parameters. moves: and with a buffer that each pass changes."""

    mean: torch.Tensor

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.rand(4))
        self.moves = moves
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.mean.add_(1)
        return (x - self.centres).square().sum()


@pytest.mark.parametrize("moves", [False, True])
def test_the_trained_parameters_of_a_criterion_are_saved(tmp_path: Path, moves: bool) -> None:
    def train(steps: int) -> tuple[Any, scarctl.Session, list[str]]:
        torch.manual_seed(steps)
        model, criterion = nn.Linear(4, 4), Centres(moves=moves)
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        settings = grouped(daemon=False)
        with scarctl.attach(model, optimizer, store=tmp_path / "s", interval=1, **settings) as session:
            session.resume()
            found = criterion.centres.detach().clone()
            for _ in range(steps):
                optimizer.zero_grad()
                criterion(model(torch.rand(2, 4))).backward()
                optimizer.step()
                drained([session])
            kinds = [caveat.kind for caveat in session.caveats]
        return (found, criterion.centres.detach().clone()), session, kinds

    (_, ended), _, kinds = train(5)
    assert kinds == (["outside-module"] if moves else [])
    (begun, _), session, _ = train(1)
    assert torch.equal(begun, ended)
    assert session.resumed is not None
    assert session.resumed.step == 5

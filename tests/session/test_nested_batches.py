"""`session.batches` within another one, and `session.epochs` in several phases."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import scarctl
from scarctl.config import grouped
from tests.loops.rig import Digits, net, train
from tests.support.training import differing


class Run:
    def __init__(self, store: Path) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.session = scarctl.attach(
            self.model, self.optimizer, store=store, **grouped(policy="full", interval=1, daemon=False)
        )
        self.session.resume()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def stops(self) -> None:
        """End as by a signal, after a flush of the moment at which the loop was settled."""
        assert self.session.flush()
        self.session._opening.close(failed=True)


def shuffled(size: int = 20) -> DataLoader[Any]:
    return DataLoader(Digits(size, noise=True), batch_size=4, shuffle=True)


def validated(store: Path, *, stop: int = 0, within: bool = False) -> Run:
    """Train, and validate after each step. stop: after so many steps; within: in the validation, not after it."""
    torch.manual_seed(3)
    run = Run(store)
    for x, y in run.session.batches(shuffled()):
        train(run.model, run.optimizer, (x, y))
        for number, (x, _) in enumerate(run.session.batches(shuffled(8))):
            run.model.eval()(x)
            if within and run.session.head_step == stop and number == 1:
                run.stops()
                return run
        run.model.train()
        run.optimizer.param_groups[0]["lr"] *= 0.9
        if stop and run.session.head_step == stop + 1:
            break
    return run


def test_a_validation_within_an_iteration_is_no_part_of_the_position(tmp_path: Path) -> None:
    whole = validated(tmp_path / "whole")
    first = validated(tmp_path / "store", stop=2)
    first.session.close()
    again = validated(tmp_path / "store")
    assert again.session.resumed is not None
    assert again.session.resumed.step == 3
    assert differing(again.state(), whole.state()) == [] or not again.session.resumed.exact
    again.session.close()
    whole.session.close()


def test_what_is_flushed_within_the_validation_is_not_called_exact(tmp_path: Path) -> None:
    validated(tmp_path / "store", stop=3, within=True)
    again = validated(tmp_path / "store")
    assert again.session.resumed is not None
    assert (again.session.resumed.step, again.session.resumed.exact) == (3, False)
    again.session.close()


def test_steps_in_an_inner_loop_are_not_called_exact(tmp_path: Path) -> None:
    first = Run(tmp_path / "store")
    for task in first.session.batches(range(3)):
        for x, y in first.session.batches(shuffled()):
            if first.session.head_step == 7:
                break
            train(first.model, first.optimizer, (x + task, y))
        if first.session.head_step == 7:
            break
    assert [caveat for caveat in first.session.caveats if caveat.kind == "nested-batches"]
    first.stops()
    again = Run(tmp_path / "store")
    assert again.session.resumed is not None
    assert (again.session.resumed.step, again.session.resumed.exact) == (7, False)
    again.session.close()


def test_a_phase_without_epochs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "scarctl"):
        for _ in run.session.epochs(2):
            for batch in run.session.batches(shuffled()):
                train(run.model, run.optimizer, batch)
        assert "no epochs left" not in caplog.text
        assert list(run.session.epochs(2)) == []
    assert "session.epochs(4)" in caplog.text
    run.session.close()


def test_a_loader_that_is_left_for_another_one_is_not_read_again(tmp_path: Path) -> None:
    def run(stop: int = 0) -> list[int]:
        seen: list[int] = []
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scarctl.attach(
            model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False)
        ) as session:
            session.resume()
            for _ in session.epochs(1):
                for loader in (range(5), range(10, 15)):
                    for number in session.batches(loader):
                        if session.head_step == stop > 0:
                            return seen
                        seen.append(number)
                        optimizer.zero_grad()
                        model(torch.full((1, 1), float(number))).sum().backward()
                        optimizer.step()
                        if number == 1:
                            break
        return seen

    assert run(stop=3) == [0, 1, 10]
    assert run() == [11, 12, 13, 14]


def test_a_cycle_over_data_that_draw_is_reported(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for noise in (False, True):
        loader = itertools.cycle(DataLoader(Digits(8, noise=noise), batch_size=4, shuffle=True))
        with scarctl.attach(
            model, optimizer, store=tmp_path / f"s{noise}", settings=scarctl.Settings(daemon=False)
        ) as session:
            for x, _ in session.batches(loader):
                if session.head_step == 3:
                    break
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            assert ("cycle-draws" in [caveat.kind for caveat in session.caveats]) == noise

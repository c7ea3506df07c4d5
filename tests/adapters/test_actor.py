"""Test actors that are killed: each call changes the state once, and answered calls stay."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
from scarctl.errors import Contention, NoIntactCopy, ScarError, Unavailable, UsageError
from scarctl_adapters.actor import ANSWERS, Calls, Kept, once
from tests.support.forkserver import Program


class Table:
    def __init__(self, store: Path, **options: Any) -> None:
        self.state = {"rows": np.zeros((8, 4))}
        self.kept = Kept(self.state, store=str(store), **options)
        self.executed = 0

    @once
    def add(self, row: int, value: float) -> float:
        self.executed += 1
        self.state["rows"][row] += value
        return float(self.state["rows"][row, 0])

    @once
    def oddly(self) -> Any:
        return object()


def add(table: Table, *args: Any, **kwargs: Any) -> Any:
    method: Any = table.add
    return method(*args, **kwargs)


def test_a_repeated_call_gets_its_answer_also_after_a_restart(tmp_path: Path) -> None:
    table = Table(tmp_path / "s")
    assert table.kept.fencing_token == 0
    assert [add(table, 1, 2.0, call=("a", n)) for n in (1, 2, 2)] == [2.0, 4.0, 4.0]
    assert add(table, 1, 1.0, call="task") == add(table, 1, 1.0, call="task") == 5.0
    assert table.executed == 3
    first = table.kept.fencing_token
    table.kept.close()

    again = Table(tmp_path / "s")
    assert (again.kept.resumed.step, again.kept.resumed.consistent) == (3, True)
    assert again.kept.fencing_token > first > 0
    assert add(again, 1, 2.0, call=("a", 2)) == 4.0, "the answer of then, not the state of now"
    assert add(again, 1, 1.0, call="task") == 5.0
    assert (again.executed, float(again.state["rows"][1, 0])) == (0, 5.0)
    with pytest.raises(UsageError, match="only the last answer is kept") as caught:
        add(again, 1, 2.0, call=("a", 1))
    assert caught.value.kind == "old-call"
    again.kept.close()


def test_what_is_no_identity_and_no_answer(tmp_path: Path) -> None:
    table = Table(tmp_path / "s")
    for call in ("", ("a",), ("a", 1.0), (1, "a"), 7):
        with pytest.raises(UsageError, match="call is"):
            add(table, 0, 1.0, call=call)
    with pytest.raises(UsageError, match="no identity"):
        add(table, 0, 1.0)
    assert table.executed == 0
    oddly: Any = table.oddly
    with pytest.raises(UsageError, match="object"):
        oddly(call="x")
    assert add(table, 0, 1.0, call="y") == 1.0
    table.kept.close()
    with pytest.raises(UsageError, match="every is 0"):
        Table(tmp_path / "t", every=0)
    assert not (tmp_path / "t").exists()


def test_answers_of_single_calls_are_few_and_those_of_callers_stay() -> None:
    calls = Calls(limit=3)
    calls.note(("worker", 1), "kept")
    for n in range(5):
        calls.note(f"task {n}", n)
    restored = Calls(limit=3)
    restored.load_state_dict(calls.state_dict())
    for one in (calls, restored):
        assert [one.find(f"task {n}") for n in range(5)] == [None, None, (2,), (3,), (4,)]
        assert one.find(("worker", 1)) == ("kept",)
    assert ANSWERS >= 1000


def test_a_second_process_of_an_actor_waits_for_the_first(tmp_path: Path) -> None:
    first = Table(tmp_path / "s")
    add(first, 0, 1.0, call="x")

    def other() -> None:
        try:
            Table(tmp_path / "s", patience=0.3)
        except Contention as error:
            refused.append(error)
        found.append(Table(tmp_path / "s", patience=60.0))

    refused, found = list[Contention](), list[Table]()
    waiting = threading.Thread(target=other)
    waiting.start()
    while not refused:
        time.sleep(0.01)
    first.kept.close()
    waiting.join()
    assert add(found[0], 0, 1.0, call="x") == 1.0
    found[0].kept.close()


def test_another_number_of_members_keeps_the_calls_of_each_number(tmp_path: Path) -> None:
    class Server:
        def __init__(self, number: int, count: int, replaces: int | None = None) -> None:
            self.first, stop = 12 * number // count, 12 * (number + 1) // count
            self.state = {"rows": np.zeros((stop - self.first, 2))}
            member = scarctl.Member(number, count, {"rows": (self.first, 12)}, replaces)
            self.kept = Kept(self.state, store=str(tmp_path / "s"), member=member, patience=0.5)

        @once
        def add(self, row: int, value: float) -> float:
            self.state["rows"][row - self.first] += value
            return float(self.state["rows"][row - self.first, 0])

    def answers(
        count: int, calls: dict[int, tuple[int, float, int]], replaces: int | None = None
    ) -> list[float]:
        found = []
        for number, (row, value, call) in calls.items():
            server: Any = Server(number, count, replaces)
            found.append(server.add(row, value, call=("w", call)))
            server.kept.close()
        return found

    assert answers(2, {0: (3, 1.0, 1), 1: (6, 2.0, 1)}) == [1.0, 2.0]
    assert answers(2, {1: (11, 3.0, 2)}) == [3.0]
    three = {0: (3, 9.0, 1), 1: (6, 1.0, 3), 2: (11, 1.0, 3)}
    assert answers(3, three, replaces=2) == [1.0, 3.0, 4.0], "member 0 has answered its call 1 before"
    assert answers(3, {1: (6, 1.0, 3), 2: (11, 1.0, 3)}) == [3.0, 4.0]


@pytest.mark.leaves_arena
def test_a_damaged_seal_is_no_new_beginning(tmp_path: Path, arena_dir: Path) -> None:
    table = Table(tmp_path / "s")
    add(table, 0, 1.0, call="x")
    table.kept.close()
    shutil.rmtree(arena_dir)
    arena_dir.mkdir()
    for file in tmp_path.glob("s/lanes/*/seg/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)
    with pytest.raises(NoIntactCopy):
        Table(tmp_path / "s")


class Killed:
    """An actor in a process that is killed, and a caller that repeats unanswered calls."""

    def __init__(self, folder: Path, every: int) -> None:
        self.store, self.socket, self.every = folder / "s", folder / "socket", every
        self.start()

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        words = [str(self.store), str(self.socket), str(self.every)]
        self.program = Program(["-m", "tests.adapters.kept_actor", *words])

    def call(self, caller: str, number: int, kill_after: float | None = None) -> list[float]:
        """Return the answer, restarting the actor as often as needed. kill_after: seconds until it is killed."""
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as client, client.makefile("rw") as stream:
                    client.connect(str(self.socket))
                    stream.write(json.dumps([caller, number]) + "\n")
                    stream.flush()
                    if kill_after is not None:
                        time.sleep(kill_after)
                        self.program.kill()
                        kill_after = None
                    if line := stream.readline():
                        answer: list[float] = json.loads(line)
                        return answer
            except (FileNotFoundError, ConnectionError):
                time.sleep(0.01)
            if self.program.poll() is not None:
                self.start()

    def end(self) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            client.sendall(b'["end", 0]\n')
            assert self.program.wait() == 0


@pytest.mark.slow
@pytest.mark.leaves_arena
@pytest.mark.parametrize("kills", [3, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_kills_at_any_moment_lose_no_answered_call_and_apply_none_twice(kills: int, tmp_path: Path) -> None:
    chance = random.Random(7)
    actor = Killed(tmp_path, every=1)
    try:
        number = 0
        for _ in range(kills):
            for kill_after in (
                None,
                None,
                chance.choice([0.0, chance.uniform(0, 0.004), chance.uniform(0, 0.03)]),
            ):
                number += 1
                answer = actor.call("caller", number, kill_after)
                assert answer == [number, number]
        assert actor.call("caller", number) == [number, number]
        actor.end()
    finally:
        actor.program.kill()
    state = {"rows": np.zeros((64, 256)), "calls": np.zeros(1, np.int64)}
    with scarctl.attach(state, store=tmp_path / "s", hooks="off", extras={"calls": Calls()}) as session:
        assert session.resume().consistent
        assert (state["rows"] == number).all()
        assert state["calls"][0] == number


def test_a_call_that_is_not_durable_yet_is_not_lost_by_a_later_one_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "s")

    def fails(**options: Any) -> None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(table.kept.session, "checkpoint", fails)
        with pytest.raises(Unavailable):
            add(table, 1, 2.0, call="first")
    with pytest.raises(IndexError):
        add(table, 99, 1.0, call="second")
    assert add(table, 1, 2.0, call="first") == 2.0
    assert table.executed == 2
    table.kept.session.close(seal=False)
    again = Table(tmp_path / "s")
    assert add(again, 1, 2.0, call="first") == 2.0
    assert again.executed == 0
    again.kept.close()


def test_no_call_is_answered_whose_state_cannot_be_sealed(tmp_path: Path) -> None:
    table = Table(tmp_path / "s")
    assert add(table, 1, 2.0, call=("a", 1)) == 2.0
    for _ in range(2):
        with pytest.raises(ScarError, match="not finite") as caught:
            add(table, 1, float("nan"), call=("a", 2))
        assert caught.value.kind == "not-sealed"
    table.state["rows"][1] = 7.0
    assert add(table, 2, 1.0, call=("b", 1)) == 1.0
    assert table.executed == 3
    table.kept.session.close(seal=False)
    again = Table(tmp_path / "s")
    assert (again.state["rows"][1, 0], again.state["rows"][2, 0]) == (7.0, 1.0)
    assert add(again, 2, 1.0, call=("b", 1)) == 1.0
    assert again.executed == 0
    again.kept.close()


@pytest.mark.slow
@pytest.mark.leaves_arena
def test_with_fewer_seals_a_kill_loses_calls_and_applies_none_twice(tmp_path: Path) -> None:
    actor = Killed(tmp_path, every=4)
    try:
        assert [actor.call("a", n)[0] for n in range(1, 7)] == [1, 2, 3, 4, 5, 6]
        actor.program.kill()
        actor.program.wait()
        actor.start()
        assert actor.call("a", 6) == [5, 5], "calls 5 and 6 came after the seal: this one was executed again"
        actor.end()
    finally:
        actor.program.kill()

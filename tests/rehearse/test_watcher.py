"""Follow sessions inside a rehearsed program."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import scarctl
from scarctl.config import SessionSettings
from scarctl.config.environment import REHEARSAL
from scarctl.errors import UsageError
from scarctl.rehearse import records
from scarctl.rehearse.run import Run
from scarctl.rehearse.watcher import watcher_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "whole" / "first"
    folder.mkdir(parents=True)
    return Run(str(folder), "", "scarctl-rehearsal-x", 40, 8)


def test_only_the_commands_own_variable_counts(run: Run) -> None:
    assert watcher_of({}) is None
    found = watcher_of(run.to_environment())
    assert found is not None
    assert found.run == run
    assert watcher_of(run.to_environment()) is found  # one for all sessions of a process
    for text in ("{", "[]", '{"folder": 3}', run.to_environment()[REHEARSAL].replace("40", '"40"')):
        with pytest.raises(UsageError, match="cannot be read"):
            watcher_of({REHEARSAL: text})


def test_the_programs_places_and_pace_are_replaced(run: Run, tmp_path: Path) -> None:
    watcher = watcher_of(run.to_environment())
    assert watcher is not None
    given = SessionSettings(
        store="s3://bucket/run",
        storage_options={"key": "k", "secret": "s"},
        arena_dir=str(tmp_path),
        peers=2,
        grace=20.0,
        max_bandwidth=1e6,
        fraction=0.5,
    )
    own = watcher.settings(given)
    assert Path(own.store).parent == Path(run.folder)
    assert (own.peers, own.daemon, own.grace, own.max_bandwidth, own.interval) == (0, False, None, None, 8)
    assert own.storage_options is None
    assert own.arena_dir == str(tmp_path / "scarctl-rehearsal-x")
    assert own.fraction == 0.5
    # The same address has the same store, another one another.
    assert watcher.settings(given).store == own.store
    assert watcher.settings(SessionSettings(store="s3://bucket/other")).store != own.store
    notes = {note.read_text() for note in Path(run.folder).glob("*.arena")}
    assert str(tmp_path / "scarctl-rehearsal-x") in notes
    for note in notes:
        os.rmdir(note)


def test_steps_are_recorded_and_the_signal_comes_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr("scarctl.rehearse.watcher._SLOW", 0.0)
    previous = signal.signal(signal.SIGUSR1, lambda number, _: sent.append(signal.Signals(number)))
    try:
        stopping = Run(run.folder, "", run.arena, 40, 1, stop=2, signal=int(signal.SIGUSR1))
        monkeypatch.setenv(REHEARSAL, stopping.to_environment()[REHEARSAL])
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = scarctl.attach(model, optimizer, store=tmp_path / "ckpt")
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        session.close()  # awaiting the signal's effect, the program may close as it likes
    finally:
        signal.signal(signal.SIGUSR1, previous)
        for note in Path(run.folder).glob("*.arena"):
            import shutil

            shutil.rmtree(note.read_text())
    assert sent == [signal.SIGUSR1]
    assert not (tmp_path / "ckpt").exists()
    found = records.read(Path(run.folder))
    ((name, lines),) = found.lines.items()
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert [len(line.inputs) for line in lines] == [1, 1, 1, 1]
    assert lines[0].before is None
    assert lines[1].before is not None
    assert lines[1].before["parameters"] == lines[0].after["parameters"] != lines[1].after["parameters"]
    assert lines[0].rates["lr"] == "0.1"
    assert found.attached[name].root == str(tmp_path / "ckpt")
    assert not found.complete


def test_a_line_that_a_killed_process_has_not_finished_is_left_out(run: Run) -> None:
    folder = Path(run.folder)
    line = records.Line(1, None, ["x"], {"lr": "0.1"}, {"parameters": "1"})
    records.append(folder, "a.0", line, again=False)
    with open(folder / "a.0.lines", "a") as file:
        file.write('{"step": 2, "bef')
    assert records.read(folder).lines == {"a.0": (line,)}


def test_all_ranks_of_a_store_have_to_reach_the_end(run: Run) -> None:
    folder = Path(run.folder)
    records.write(folder, "a.0", records.Attached("a.0", "ckpt", "a", None, 2))
    records.write(folder, "a.0", records.Final(8))
    assert not records.read(folder).complete
    records.write(folder, "a.1", records.Final(8, differences=(records.Difference("w", "1 of 2 values"),)))
    found = records.read(folder)
    assert found.complete
    assert found.finals["a.1"].differences[0].name == "w"

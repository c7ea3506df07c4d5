"""Test `scarctl run` as a process, with commands that are processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from scarctl.arena.folder import host_folder
from scarctl.cli.run import _Unattached
from scarctl.daemon import client
from tests.cli.running import Running
from tests.daemon.trainer import Trainer, idle, status
from tests.support.stored import stored_steps
from tests.support.waiting import wait_until

# -- the command -------------------------------------------------------------------------------------------------


def test_exit_codes(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("text")
    for code, command in {
        137: ["sh", "-c", "kill -KILL $$"],
        143: ["--restarts", "1", "--", "sh", "-c", "kill -TERM $$"],
        126: ["--restarts", "1", plain],
    }.items():
        done = Running(tmp_path, *command).ends(code)
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == (code > 125 and code != 137), "what cannot be started is not started again"
        assert all(str(command[-1]) in line for line in lines if code == 126)


def test_what_the_command_gets(
    folder: Path, tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCARCTL_OVERHEAD")  # the one of the tests

    def told(*options: str) -> dict[str, str]:
        lines = Running(tmp_path, *options, "--", "env").ends(0).stdout.splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    environment = told()
    assert (environment["SCARCTL_DAEMON"], environment["SCARCTL_RESTART_COUNT"]) == ("1", "0")
    assert environment["SCARCTL_ARENA_DIR"] == str(arena_dir)
    assert "SCARCTL_STORE" not in environment
    assert "SCARCTL_PEERS" not in environment
    assert "SCARCTL_OVERHEAD" not in environment
    place = os.path.relpath(arena_dir, tmp_path)
    environment = told("--peers", "2", "--overhead", "2%", "--store", "ckpt", "--arena-dir", place)
    assert (environment["SCARCTL_PEERS"], environment["SCARCTL_OVERHEAD"]) == ("2", "0.02")
    # Absolute, because the command may change its folder first.
    assert environment["SCARCTL_STORE"] == str(tmp_path / "ckpt")
    assert environment["SCARCTL_ARENA_DIR"] == str(arena_dir)


def test_options_of_the_command_are_its_own(folder: Path, tmp_path: Path) -> None:
    options = ["--store", "x", "--restarts", "x", "--help", "--", "-v", "--debug"]
    done = Running(tmp_path, "printf", "%s\n", *options).ends(0)
    assert done.stdout.split() == options


def test_streams_pass_through(folder: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    program = f"import os, sys; os.write({write}, sys.stdin.buffer.read()); print('out'); sys.exit('err')"
    running = Running(
        tmp_path, "--", sys.executable, "-S", "-c", program, stdin=subprocess.PIPE, pass_fds=(write,)
    )
    os.close(write)
    stdin: IO[bytes] | None = running.process.stdin
    assert stdin is not None
    stdin.write(b"in\0\xff")
    stdin.close()
    done = running.ends(1)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    with open(read, "rb") as pipe:
        assert pipe.read() == b"in\0\xff"


def test_restarts(folder: Path, tmp_path: Path) -> None:
    third = ["sh", "-c", "echo $SCARCTL_RESTART_COUNT; exit $((2 - SCARCTL_RESTART_COUNT))"]
    done = Running(tmp_path, "--restarts", 5, "--", *third).ends(0)
    assert done.stdout == "0\n1\n2\n"
    assert "exit code 2: restart 1 of 5" in done.stderr
    assert "exit code 1: restart 2 of 5" in done.stderr


# -- what the command leaves -------------------------------------------------------------------------------------


class Training(Running):
    """`scarctl run` with a training process without torch that has taken some steps."""

    def __init__(self, place: Path, base: Path, *options: object, steps: int = 100_000) -> None:
        command = [sys.executable, "-m", "tests.daemon.trainer", "store", base, steps]
        super().__init__(place, *options, "--", *command)
        self.store = place / "store"
        self.folder = host_folder(str(base))
        self.says("\n", 8)
        answer = status(self.folder)
        assert answer is not None
        self.daemon = int(answer["pid"])
        self.trainer = int(answer["runs"][0]["pid"])

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.split("\n")[:-1]]

    def disk(self, full: bool) -> None:
        """Make the daemon unable to write a byte, or able again."""
        _, hard = resource.prlimit(self.daemon, resource.RLIMIT_FSIZE)
        resource.prlimit(self.daemon, resource.RLIMIT_FSIZE, (0 if full else hard, hard))
        if full:
            wait_until(lambda: (last := self.told()[-1])["handed"] != last["durable"])
            wait_until(lambda: status(self.folder)["runs"][0]["errors"])  # type: ignore[index]

    def kill(self) -> dict[str, Any]:
        """Send SIGKILL to the training process; return its last message."""
        os.kill(self.trainer, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{self.trainer}").exists())
        return self.told()[-1]

    def stored(self) -> list[int]:
        """Return the step of every partition, as its values show, in an intact store."""
        return list(stored_steps(self.store))


def at_least(found: list[int], told: list[int]) -> bool:
    return all(a >= b for a, b in zip(found, told, strict=True))


@pytest.mark.leaves_arena
class TestDead:
    def test_what_it_handed_over_is_waited_for(self, folder: Path, arena_dir: Path, tmp_path: Path) -> None:
        training = Training(tmp_path, arena_dir, "--store", "store")
        training.disk(full=True)
        told = training.kill()
        assert not at_least(training.stored(), told["handed"])
        time.sleep(0.5)
        assert training.process.poll() is None
        training.disk(full=False)
        # A copy that was under way when the process died was not handed over, and may be left in memory.
        assert "not durable yet" not in training.ends(137).stderr
        assert at_least(training.stored(), told["handed"])
        wait_until(lambda: idle(folder))

    def test_a_dead_daemon(self, folder: Path, arena_dir: Path, tmp_path: Path) -> None:
        training = Training(tmp_path, arena_dir)
        training.disk(full=True)
        os.kill(training.trainer, signal.SIGSTOP)  # it would start another one
        os.kill(training.daemon, signal.SIGKILL)
        training.kill()
        training.ends(137, seconds=5.0)
        assert "partitions only in memory; the next session of that run" in training.stderr
        assert str(folder) in training.stderr
        assert training.stored()


def test_others_are_not_waited_for(folder: Path, arena_dir: Path, tmp_path: Path) -> None:
    other = Trainer(tmp_path / "other", arena_dir)
    other.save(other.everything, 1)
    other.saver.stop()
    other.save(other.everything, 2)
    done = Running(tmp_path, "true").ends(0, seconds=10.0)
    assert "not durable" not in done.stderr
    assert status(folder) is not None, "their daemon goes on"
    other.saver.resume()
    other.close()


def test_nothing_stays(arena_dir: Path, tmp_path: Path) -> None:
    """A command that attaches nothing, with a daemon that would wait for it, leaves no process and no file."""
    Running(tmp_path, "true").ends(0)
    folder = host_folder(str(arena_dir))
    wait_until(lambda: status(folder) is None, seconds=3.0)


def test_a_process_that_is_killed_continues_with_its_memory(
    folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    training = Training(tmp_path, arena_dir, "--restarts", 2, steps=40)
    told = training.kill()
    training.ends(0)
    assert "ended with exit code 137: restart 1 of 2" in training.stderr
    lines = training.told()
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "the next process counts on from what the memory has"
    assert told["step"] + 40 <= steps[-1] <= told["step"] + 41
    # Partitions that wait for the store are not copied again, so the last copies are of several steps.
    assert training.stored() == lines[-1]["handed"]
    assert at_least(training.stored(), told["handed"])


def test_a_command_that_attaches_nothing_is_warned_of(folder: Path, tmp_path: Path) -> None:
    """A command that fails has printed why, so nothing is added."""
    done = Running(tmp_path, "true").ends(0)
    assert done.stderr.startswith("scarctl: warning: true has ended, and no session has attached")
    assert Running(tmp_path, "false").ends(1).stderr == ""


def test_a_long_command_that_attaches_nothing_is_warned_of_while_it_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hold(folder, 60)
    watch = _Unattached(folder, "train")
    watch.look("is running")
    watch.look("has ended")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scarctl: warning: train is running, and no session has attached")


def test_a_session_that_attaches_is_seen(
    folder: Path, arena_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hold(folder, 60)
    watch = _Unattached(folder, "train")
    Trainer(tmp_path / "store", arena_dir).close()
    watch.look("has ended")
    assert capsys.readouterr().err == ""

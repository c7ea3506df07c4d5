"""Test the daemon as a process: its start and end, what it inherits, and who may connect."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scarctl.daemon import client
from scarctl.daemon.__main__ import LOCK, LOG
from scarctl.errors import Unavailable
from tests.daemon.trainer import Trainer, assert_sound, status
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 5.0
"""Longer than any action here takes on a busy machine; the aim is one second."""


@pytest.fixture(autouse=True)
def forked_daemons() -> None:
    """Start daemons as users do, by overriding what other tests do."""


@pytest.fixture
def pid(folder: Path) -> int:
    """Yield the process id of a daemon that stays."""
    return begin(folder)


def begin(folder: Path) -> int:
    return client.hold(folder, 60)


def gone(pid: int) -> bool:
    """Return whether the process has ended, even if its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class TestEnding:
    @pytest.mark.leaves_arena
    def test_sigterm_to_all_saves_what_dying_processes_flush(
        self, folder: Path, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A batch system ends every process of the job: the last copies come after the daemon's own signal."""

        def no_start(*_: object) -> None:
            raise Unavailable("the job ends: nobody starts anything any more")

        trainer = Trainer(tmp_path / "store", arena_dir)
        trainer.save_durably(1, sealed=True)
        monkeypatch.setattr(client, "start", no_start)
        daemon = status(folder)["pid"]  # type: ignore[index]
        os.kill(daemon, signal.SIGTERM)
        time.sleep(0.5)
        trainer.save(trainer.everything, 2, sealed=True)
        trainer.die()
        wait_until(lambda: gone(daemon))
        assert set(trainer.stored()[0]) == {2}
        assert_sound(tmp_path / "store")

    def test_the_second_sigterm_does_not_wait(self, folder: Path, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: gone(pid))

    def test_it_survives_the_session_that_started_it(self, folder: Path) -> None:
        """A hang-up of the terminal reaches every process of the session; an interrupt reaches its foreground."""
        program = (
            "import sys, time\nfrom pathlib import Path\nfrom scarctl.daemon import client\n"
            "client.hold(Path(sys.argv[1]), 60)\nprint('ready', flush=True)\ntime.sleep(60)"
        )
        starter = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        with starter:
            assert starter.stdout is not None
            assert starter.stdout.readline() == b"ready\n"
            daemon = status(folder)["pid"]  # type: ignore[index]
            assert os.getsid(daemon) not in (os.getsid(starter.pid), os.getsid(0))
            os.killpg(starter.pid, signal.SIGHUP)
        assert starter.returncode == -signal.SIGHUP
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            os.kill(daemon, number)
        time.sleep(0.3)
        assert status(folder)["pid"] == daemon  # type: ignore[index]


class TestStarting:
    def test_several_at_once_get_one(self, folder: Path) -> None:
        program = (
            "import sys\nfrom pathlib import Path\nfrom scarctl.daemon import client\n"
            "print(client.hold(Path(sys.argv[1]), 60), flush=True)"
        )
        starters = [
            subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, cwd=ROOT)
            for _ in range(4)
        ]
        told = [starter.communicate(timeout=60)[0] for starter in starters]
        assert [starter.returncode for starter in starters] == [0] * 4
        assert set(told) == {f"{status(folder)['pid']}\n".encode()}  # type: ignore[index]

    def test_nothing_of_the_starter_is_kept(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read, write = os.pipe()
        os.set_inheritable(write, True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            daemon = begin(folder)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(write)
        os.set_blocking(read, False)
        assert os.read(read, 1) == b"", "nobody else has the other end"
        os.close(read)
        deadline = time.monotonic() + 5
        briefly = {str(folder), f"/proc/{daemon}/autogroup"}  # the daemon looks at both now and then
        while True:
            files = {}
            for entry in Path(f"/proc/{daemon}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    files[int(entry.name)] = os.readlink(entry)
            if briefly.isdisjoint(files.values()) or time.monotonic() > deadline:
                break
        assert {files.pop(stream) for stream in (0, 1, 2)} == {"/dev/null"}
        known = [target for target in files.values() if not target.startswith("socket:")]
        assert sorted(known) == [str(folder / LOCK), str(folder / LOG)]
        assert os.readlink(f"/proc/{daemon}/cwd") == "/"

        def words() -> dict[str, str]:
            lines = Path(f"/proc/{daemon}/status").read_text().splitlines()
            return dict(line.split(":\t", 1) for line in lines)

        wait_until(lambda: int(words()["SigBlk"], 16) == 0)  # while it creates a thread, all are blocked
        assert int(words()["PPid"]) != os.getpid()
        autogroup = Path(f"/proc/{daemon}/autogroup")
        if autogroup.exists():
            wait_until(lambda: autogroup.read_text().endswith("nice 10\n"))
        loaded = Path(f"/proc/{daemon}/maps").read_text()
        assert "numpy" in loaded
        assert "torch" not in loaded

    def test_a_large_log_is_begun_anew(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        (folder / LOG).write_bytes(b"x" * (2 << 20))
        begin(folder)
        assert (folder / LOG).stat().st_size < 1000


# -- other users -------------------------------------------------------------------------------------------------

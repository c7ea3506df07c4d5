"""Run Python programs as processes forked from one that has imported the slowest modules.

    done = run(["-m", "tests.distributed.job", "fsdp"], env=..., timeout=60)

A program has its own arguments, environment, folder and standard streams, and can be killed like any other. All
programs share a past: the server has imported some modules, in a new interpreter, and has never had a thread. At the
end threads are waited for and exit handlers run, but objects that still exist are not deleted. If that makes a
difference (imports, options of the interpreter, its end), use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
TORCH = (
    "scarctl.session.session",
    "torch._dynamo",
    "torch.distributed.run",
    "tests.distributed.jobs",
    "tests.distributed.checks",
)
"""Modules that training loops import, some of them at their first step."""
_PYTHON = sys.executable
_IMPORT_SECONDS = 240.0
"""Seconds for a server to import them, on a machine on which several do so at once."""


class Program:
    """A running program. `arguments` are those that python would get: "-m", "-c" or a script, and the program's own."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: IO[bytes] | int | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        imports: tuple[str, ...] = TORCH,
        session: bool = False,
    ) -> None:
        """`stdin`, `stdout`, `stderr`: open files. None means empty input, and this process's own output.

        `imports`: modules that are already imported. `session`: it leads a session and a group of its own.
        """
        self.args = arguments
        self.returncode: int | None = None
        self._server = _server(imports)
        task = {
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd),
            "session": session,
        }
        with open(os.devnull, "rb") as nothing:
            streams = [
                nothing if stdin is None else stdin,
                1 if stdout is None else stdout,
                2 if stderr is None else stderr,
            ]
            files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            self.pid = self._server.start(task, files)

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired; then it still runs."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._server.listen(min(left, 0.2))  # another thread may have read the report
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The id is kept until the end was reported: until then no other process can get it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str], *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and capture its output. Raises as `subprocess.run`; nothing of it is left then."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:

        def written(file: IO[bytes]) -> str:
            file.seek(0)
            return file.read().decode()

        program = Program(arguments, stdout=stdout, stderr=stderr, **options)
        try:
            code = program.wait(timeout)
        except BaseException as error:
            program.kill()
            program.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                error.output, error.stderr = written(stdout), written(stderr)
            raise
        done = subprocess.CompletedProcess(list(arguments), code, written(stdout), written(stderr))
    if check:
        done.check_returncode()
    return done


class Forks:
    """Stand for the module `subprocess` in a module that starts Python programs: these are forked."""

    def __init__(self, imports: tuple[str, ...] = TORCH) -> None:
        self._imports, self._owner = imports, os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def _forks(self, command: Sequence[str]) -> bool:
        # A forked process does not share the server with its parent; a test may name another interpreter.
        return os.getpid() == self._owner and command[0] == _PYTHON

    def run(self, command: Sequence[str], *, timeout: float, env: Mapping[str, str], **options: Any) -> Any:
        """Run a command as `subprocess.run`, always with its output captured."""
        if not self._forks(command):
            return subprocess.run(command, timeout=timeout, env=env, **options)
        done = run(
            command[1:],
            timeout=timeout,
            env=env,
            cwd=Path(options.get("cwd") or os.getcwd()),
            imports=self._imports,
        )
        if options.get("text"):
            return done
        return subprocess.CompletedProcess(command, done.returncode, None, done.stderr.encode())

    def Popen(self, command: Sequence[str], **options: Any) -> Any:  # noqa: N802
        """Start a command as `subprocess.Popen`, with files or `subprocess.DEVNULL` as its streams."""
        if not self._forks(command):
            return subprocess.Popen(command, **options)
        streams = {
            name: None if name == "stdin" else options[name]
            for name in ("stdin", "stdout", "stderr")
            if name in options
        }
        return Program(
            command[1:],
            env=options["env"],
            cwd=Path(options.get("cwd") or os.getcwd()),
            imports=self._imports,
            session=options.get("start_new_session", False),
            **streams,
        )


def servers() -> list[int]:
    """Return their process ids. They live as long as this process."""
    return [server.process.pid for server in _servers]


_servers: list[_Server] = []


class _Server:
    """This process's side of a server."""

    def __init__(self, imports: Sequence[str]) -> None:
        mine, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [_PYTHON, "-m", "tests.support.forkserver", str(its.fileno()), *imports],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("SCARCTL_")},
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT), str(ROOT / "adapters"), *filter(None, sys.path)]
                    ),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    # Another seed than that of the process that tests: orders of sets and hashes differ.
                    "PYTHONHASHSEED": "random",
                },
            )
        self._socket, self._owner = mine, os.getpid()
        self._starting, self._listening = threading.Lock(), threading.Lock()
        self._rest = b""
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        _servers.append(self)
        atexit.register(self._stop)

    def _stop(self) -> None:
        if self.process.poll() is None and os.getpid() == self._owner:
            self._socket.close()
            self.process.wait()

    def start(self, task: Any, files: Sequence[int]) -> int:
        data = json.dumps(task).encode()
        with self._starting:
            socket.send_fds(self._socket, [struct.pack("!I", len(data))], files)
            self._socket.sendall(data)
            while not self._started:
                assert self.listen(_IMPORT_SECONDS), "the server of forks does not answer"
            return self._started.pop()

    def ended(self, pid: int) -> int | None:
        while self.listen(0.0):
            pass
        return self._ended.pop(pid, None)

    def listen(self, seconds: float) -> bool:
        """Read its messages, waiting so long for them. Return False if there were none."""
        if not select.select([self._socket], [], [], max(0.0, seconds))[0]:
            return False
        with self._listening:
            if not select.select([self._socket], [], [], 0.0)[0]:
                return True  # another thread has read it
            data = self._socket.recv(1 << 16)
            assert data, "the server of forks has died"
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "started" in told:
                    self._started.append(told["started"])
                else:
                    self._ended[told["ended"]] = told["code"]
        return True


@functools.cache
def _server(imports: tuple[str, ...]) -> _Server:
    return _Server(imports)


# -- in the server --------------------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork until the other side ends. In a fork, return the request to become."""
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    running: set[int] = set()

    def tell(**what: int) -> None:
        control.sendall(json.dumps(what).encode() + b"\n")

    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                running.discard(pid)
                tell(ended=pid, code=os.waitstatus_to_exitcode(status))
        if control in ready:
            data, files, _, _ = socket.recv_fds(control, 4, 3)
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            size, task = struct.unpack("!I", data)[0], b""
            while len(task) < size:
                task += control.recv(size - len(task))
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (wake, waker, control):
                    end.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                found: dict[str, Any] = json.loads(task)
                return found
            for file in files:
                os.close(file)
            running.add(pid)
            tell(started=pid)


def _become(arguments: list[str], env: dict[str, str], cwd: str, session: bool) -> None:
    """Run the program, as the interpreter's main function would."""
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    # Forks have the server's random numbers; a new interpreter has its own.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    what, *rest = arguments
    if what == "-m":
        sys.path.insert(0, cwd)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(what).parent))
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


def _leave(code: object) -> None:
    """End as the interpreter does, but keep its modules: deleting them copies the server's memory, in half a second.

    Returns without having ended if that takes the interpreter: text to print as the reason, or output that fails.
    """
    if code is not None and not isinstance(code, int):
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit((code or 0) & 0xFF)


def _main() -> None:
    number, *imports = sys.argv[1:]
    for name in imports:
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # pages that the collector does not write to stay shared
    try:
        _become(**_serve(socket.socket(fileno=int(number))))
    except SystemExit as end:
        _leave(end.code)
        raise
    _leave(None)


if __name__ == "__main__":
    _main()

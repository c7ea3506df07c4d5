"""Provide every test with its own environment, and check that it leaves nothing behind."""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.support import forkserver
from tests.support.places import KEY, SECRET, Bucket, Place, s3_client, s3_server
from tests.support.proxy import Proxy, proxy

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch: several workers with a thread per core each would fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background shell or nohup sets these signals to ignored, and every process that tests end would inherit
# that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Wall-clock deadlines fail on a busy machine; in CI the examples are the same every time.
settings.register_profile(
    "scarctl",
    max_examples=20,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("long", settings.get_profile("scarctl"), max_examples=200)
settings.load_profile("scarctl")

ARENA_VARIABLE = "SCARCTL_ARENA_DIR"
DAEMON_FILES = ("daemon.lock", "daemon.log")
"""Files that a daemon leaves on purpose."""
GRACE_SECONDS = 5.0
"""Time within which stopped processes and threads of a test have to be gone."""

T = TypeVar("T")


def pytest_collection_finish() -> None:
    """Freeze the modules imported so far, so that the collector, which many tests call, does not scan them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def arena_dir(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield the base folder for arenas, one per test: never the machine's real shared memory, never another test's.

    Fail the test if at its end a child process, a thread that is not a daemon, a changed signal handler, or a file in
    the arena folder remains. Mark a test `leaves_arena` if it leaves files on purpose.
    """
    for name in [name for name in os.environ if name.startswith("SCARCTL_")]:
        monkeypatch.delenv(name)
    # A thread unless a test says otherwise (`both_savers`): starting a daemon takes a while.
    monkeypatch.setenv("SCARCTL_DAEMON", "0")
    # Checkpoints in memory only where a test's interval asks for them, and not by the clock.
    monkeypatch.setenv("SCARCTL_OVERHEAD", "1e-9")
    # Short, because a Unix socket may lie in it and its path is limited to about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="scarctl-"))
    monkeypatch.setenv(ARENA_VARIABLE, str(folder))
    threads = set(threading.enumerate())
    processes = set(_ids())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield folder
        _dismiss_daemons(folder)
        leaks = _settled(lambda: [*_new_threads(threads), *_new_processes(folder, processes).values()])
        for pid in _new_processes(folder, processes):
            os.kill(pid, signal.SIGKILL)  # so that it does not disturb later tests
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                leaks.append(f"a handler of {number.name}")
                signal.signal(number, handler)
        if request.node.get_closest_marker("leaves_arena") is None:
            left = (file for file in folder.rglob("*") if not file.is_dir() and file.name not in DAEMON_FILES)
            leaks += [str(file.relative_to(folder)) for file in left]
    finally:
        shutil.rmtree(folder)
    if leaks:
        pytest.fail(f"left behind: {', '.join(map(str, leaks))}", pytrace=False)


@pytest.fixture(params=["thread", pytest.param("daemon", marks=pytest.mark.long)])
def both_savers(request: pytest.FixtureRequest, arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: saving from a thread of the training process, and, in `make long`, from the host's daemon.

    What the daemon does differently has tests of its own, in tests/daemon and in all that save as by default.
    """
    monkeypatch.setenv("SCARCTL_DAEMON", "1" if request.param == "daemon" else "0")
    return str(request.param)


@pytest.fixture
def usual_saver(arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save as by default."""
    from tests.support import daemons

    daemons.fork(monkeypatch)
    monkeypatch.delenv("SCARCTL_DAEMON")


@pytest.fixture
def daemon_folder(arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the host's daemon for tests without `both_savers`. The daemon is stopped at the end."""
    from scarctl.arena.folder import host_folder
    from scarctl.daemon import protocol
    from tests.daemon.trainer import stop
    from tests.support import daemons

    daemons.fork(monkeypatch)
    monkeypatch.setenv("SCARCTL_DAEMON", "1")
    folder = host_folder(str(arena_dir))
    yield folder
    stop(folder)
    (folder / protocol.SOCKET).unlink(missing_ok=True)


@pytest.fixture
def soon_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write full records after a few commits, so that faults affect them, too."""
    monkeypatch.setattr("scarctl.store.writer.FULL_LEAST", 1)


@pytest.fixture(scope="module")
def warm_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import torch's modules of the first step here, once, and not in every forked child."""
    from tests.support.training import Loop

    folder = tmp_path_factory.mktemp("warm")
    loop = Loop(folder / "store", arena_dir=folder, daemon=False)
    loop.train(1)
    loop.session.close()


def _settled(leaks: Callable[[], list[object]]) -> list[object]:
    """Return the leaks that remain after a grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := leaks()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]


def _dismiss_daemons(folder: Path) -> None:
    """End daemons without a run, which would wait a while for another. A daemon with a run is a leak."""
    for socket in folder.glob("*/daemon.sock"):
        from tests.daemon.trainer import idle, stop

        if not _settled(lambda host=socket.parent: [] if idle(host) else [host]):
            stop(socket.parent)


def _ids() -> list[int]:
    """Return the ids of all processes of the machine; none without /proc."""
    return list(map(int, filter(str.isdigit, os.listdir("/proc")))) if os.path.isdir("/proc/self") else []


def _new_processes(folder: Path, before: set[int]) -> dict[int, str]:
    """Return command lines by process id: of new children, and of new processes started with this arena folder.

    A detached process is not a child any longer, but keeps its environment; a forked daemon has files in the folder.
    """
    found: dict[int, str] = {}
    # Helpers that live as long as the interpreter: the standard library's own, and those that fork programs for tests.
    servers = forkserver.servers()
    helpers = {
        os.getpid(),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
        *servers,
    }
    marker = f"{ARENA_VARIABLE}={folder}".encode()
    for pid in _ids():
        if pid in before or pid in helpers:
            continue
        try:
            state, parent = _stat(pid)
            ours = parent in (os.getpid(), *servers)
            ours = ours or marker in _read(f"/proc/{pid}/environ").split(b"\0") or _opens(pid, folder)
            if ours and state != "Z":
                found[pid] = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or belongs to another user
    return found


def _opens(pid: int, folder: Path) -> bool:
    """Return whether a process has opened a file in this folder."""
    opened = f"/proc/{pid}/fd"
    return any(os.readlink(f"{opened}/{fd}").startswith(f"{folder}/") for fd in os.listdir(opened))


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1])


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Yield the address of an S3 server for all tests. For another one see tests/store/conformance/real_server.py."""
    if endpoint := os.environ.get("TEST_S3_ENDPOINT"):
        yield endpoint
        return
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_proxy(s3_endpoint: str) -> Iterator[Proxy]:
    """Yield a proxy in front of the server. Tests use `wire`."""
    with proxy(s3_endpoint) as running:
        yield running


@pytest.fixture
def wire(s3_proxy: Proxy) -> Iterator[Proxy]:
    """Yield the proxy in its initial state: a new proxy would need new clients."""
    s3_proxy.reset()
    yield s3_proxy
    s3_proxy.reset()


@pytest.fixture(scope="session")
def s3_clients() -> list[Any]:
    """Return clients made by tests. Later clients with the same options share them, which saves half a second each."""
    return []


@pytest.fixture
def s3_place(s3_endpoint: str, s3_clients: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a new bucket, and storage options that open it, without this machine's own AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    from scarctl.store.backends.client import _open

    client, bucket = s3_client(s3_endpoint), f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    options = {"endpoint_url": s3_endpoint, "key": KEY, "secret": SECRET}
    yield Place(f"s3://{bucket}/team/run", Bucket(client, bucket, "team/run"), options)
    made = [opened.fs for opened in _open.values() if opened.fs.protocol[0] == "s3"]
    s3_clients += [fs for fs in made if not any(fs is kept for kept in s3_clients)]

"""Run the conformance suite and `scarctl doctor` on a real S3 server: Ceph's object gateway, from Debian's packages.

    python -m tests.store.conformance.real_server [--folder DIR] [-- pytest's arguments]

Nothing is installed: the packages are unpacked in a folder of their own (300 MB; kept with `--folder` for the next
time). One monitor, one object store in memory and one gateway run as plain processes on the loopback interface, and end
with this one. For Debian and Ubuntu.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.places import KEY, SECRET, s3_client

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
SUITE = ("tests/store/conformance/test_s3.py",)
START_SECONDS = 120.0
ENDPOINT_VARIABLE = "TEST_S3_ENDPOINT"
"""Variable with the address of a server that tests use in place of theirs: `s3_endpoint` in tests/conftest.py."""


def unpack(folder: Path) -> Path:
    """Unpack the packages and their dependencies, unless they are there."""
    root = folder / "root"
    if (root / "done").exists():
        return root
    debs = folder / "debs"
    (debs / "partial").mkdir(parents=True, exist_ok=True)
    plan = [
        "apt-get",
        "install",
        "--simulate",
        "--no-install-recommends",
        "-o",
        "Debug::NoLocking=1",
        *PACKAGES,
    ]
    wanted = [
        line.split()[1]
        for line in subprocess.run(plan, check=True, capture_output=True, text=True).stdout.splitlines()
        if line.startswith("Inst ")
    ]
    subprocess.run(["apt-get", "download", "-q", *(wanted or PACKAGES)], check=True, cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", deb, root], check=True)
    (root / "done").touch()
    return root


class Ceph:
    """One monitor, one object store in memory and one gateway, as child processes."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.conf = folder / "ceph.conf"
        self.port = _free_port()
        libraries = [p for p in (root / "usr/lib", root / "lib") for p in p.glob("*-linux-gnu")]
        libraries += [path / "ceph" for path in libraries if (path / "ceph").is_dir()]
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
        }
        library = next(path for path in libraries if (path / "rados-classes").is_dir())
        self.conf.write_text(
            f"""[global]
fsid = {uuid.uuid4()}
mon_host = [v2:127.0.0.1:{_free_port()},v1:127.0.0.1:{_free_port()}]
mon_initial_members = a
public_network = 127.0.0.0/8
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
mon_data = {folder}/mon
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 10000
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_crush_chooseleaf_type = 0
osd_class_dir = {library}/rados-classes
plugin_dir = {library}/ceph
erasure_code_dir = {library}/ceph/erasure-code
run_dir = {folder}
pid_file =
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{self.port}
rgw_enable_usage_log = false
"""
        )

    def call(self, program: str, *arguments: object) -> None:
        """Run one of Ceph's programs to its end."""
        subprocess.run(self._command(program, arguments), check=True, env=self.env, stdout=subprocess.DEVNULL)

    @contextmanager
    def running(self, program: str, *arguments: object) -> Iterator[None]:
        """Run one of Ceph's servers."""
        log = (self.folder / f"{program}.out").open("wb")
        with (
            log,
            subprocess.Popen(
                self._command(program, arguments), env=self.env, stdout=log, stderr=log
            ) as process,
        ):
            try:
                yield
            finally:
                process.kill()

    def _command(self, program: str, arguments: tuple[object, ...]) -> list[str]:
        path = str(self.root / "usr/bin" / program)
        # Its shell is a script for the system's Python, whose extension modules were unpacked.
        start = ["/usr/bin/python3", path] if program == "ceph" else [path]
        return [*start, "-c", str(self.conf), *map(str, arguments)]

    @contextmanager
    def started(self) -> Iterator[str]:
        """Yield the gateway's address."""
        fsid = self.conf.read_text().split("fsid = ")[1].split()[0]
        addresses = self.conf.read_text().split("mon_host = ")[1].split()[0]
        monmap = self.folder / "monmap"
        tool = [str(self.root / "usr/bin/monmaptool"), "--create", "--clobber", "--fsid", fsid]
        subprocess.run(
            [*tool, "--addv", "a", addresses, str(monmap)],
            check=True, env=self.env, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (self.folder / "osd").mkdir()
        (self.folder / "rgw").mkdir()
        with ExitStack() as stack:
            self.call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
            stack.enter_context(self.running("ceph-mon", "-i", "a", "-f"))
            identity = uuid.uuid4()
            self.call("ceph", "osd", "new", identity)
            self.call("ceph-osd", "-i", 0, "--mkfs", "--osd-uuid", identity)
            stack.enter_context(self.running("ceph-osd", "-i", 0, "-f"))
            who = ["--uid", "tests", "--display-name", "tests", "--access-key", KEY, "--secret", SECRET]
            self.call("radosgw-admin", "user", "create", *who)
            stack.enter_context(self.running("radosgw", "-n", "client.rgw", "-f"))
            yield _answering(f"http://127.0.0.1:{self.port}")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _answering(url: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return url
        except urllib.error.HTTPError:
            return url
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def doctor(endpoint: str, folder: Path) -> int:
    """Run `scarctl doctor` on a new bucket of the server."""
    s3_client(endpoint).create_bucket(Bucket="doctor")
    options = f'[storage_options]\nendpoint_url = "{endpoint}"\nkey = "{KEY}"\nsecret = "{SECRET}"\n'
    (folder / "scarctl.toml").write_text(options)
    paths = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "scarctl", "doctor", "--store", "s3://doctor/run"]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.store.conformance.real_server", description=__doc__
    )
    parser.add_argument("--folder", type=Path, help="where the packages are unpacked, and stay")
    parser.add_argument("pytest", nargs="*", default=list(SUITE), help="what pytest is to run")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="scarctl-ceph-"))
    try:
        packages = (args.folder or scratch / "packages").resolve()
        packages.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        root = unpack(packages)
        unpacked = time.monotonic()
        with Ceph(root, scratch).started() as endpoint:
            ready = time.monotonic()
            print(f"unpacked in {unpacked - started:.0f} s, started in {ready - unpacked:.0f} s", flush=True)  # noqa: T201
            sound = doctor(endpoint, scratch) == 0
            command = [sys.executable, "-m", "pytest", "-q", *args.pytest]
            tests = subprocess.run(command, env={**os.environ, ENDPOINT_VARIABLE: endpoint}).returncode
        return int(not sound or tests != 0)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main())

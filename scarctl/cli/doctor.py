"""`scarctl doctor`: test the guarantees of a place for a store, and its speed; or whether a peer can be reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.given import named_store
from scarctl.cli.output import (
    EXIT_NO_GUARANTEE,
    EXIT_OK,
    emit,
    note,
    options_for,
    output_options,
    store_argument,
)
from scarctl.config.checks import check_peer_files, parse_paths
from scarctl.errors import UsageError
from scarctl.util.text import human_bytes

if TYPE_CHECKING:
    from scarctl.peers.probe import PeerDiagnosis
    from scarctl.store.doctor import Diagnosis

EXAMPLES = """\b
Examples:
  scarctl doctor --store ckpt
  scarctl doctor --store s3://bucket/ckpt --json
  scarctl doctor --peer 10.0.0.7:41873
  scarctl doctor --peer 10.0.0.7:41873 --peer-tls host.pem,host.key,ca.pem
"""


class Files(click.ParamType[Any]):
    """Three paths separated by commas, or a list of three in `scarctl.toml`."""

    name = "files"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the paths. Raises UsageError unless there are three."""
        files = parse_paths(value) if isinstance(value, str) else value
        check_peer_files(files, None)
        return tuple(files)


@click.command(epilog=EXAMPLES)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Number of races of 16 writers for one file.",
)
@click.option("--peer", metavar="HOST:PORT", help="Where a daemon listens for peers, according to its log.")
@click.option(
    "--peer-tls",
    metavar="CERT,KEY,CA",
    type=Files(),
    help="PEM files of a host, to test a daemon that uses TLS with --peer.",
)
@store_argument
@output_options
def command(
    place: str | None, store: str | None, peer: str | None, peer_tls: tuple[str, ...] | None, rounds: int
) -> int:
    """Test a place for a store: its guarantees, their consequences, and its speed.

    This creates files in a folder of its own, and deletes them. An existing store is not touched. Exit code 14: a
    guarantee is missing that commits rely on. With --peer, test whether a daemon that keeps copies of memory answers.
    """
    store = named_store(place, store)
    if (store is None) == (peer is None):
        raise UsageError("give either STORE or --peer")
    if peer is not None:
        return _peer(peer, peer_tls)
    assert store is not None
    from scarctl.store.doctor import diagnose

    found = diagnose(store, storage_options=options_for(store), rounds=rounds, progress=note)
    emit(found.to_json(), text=_text(found))
    return EXIT_OK if found.sound else EXIT_NO_GUARANTEE


def _peer(peer: str, files: tuple[str, ...] | None) -> int:
    from scarctl.peers.probe import parse_peer, probe
    from scarctl.peers.tls import Tls

    host, port = parse_peer(peer)
    found = probe(host, port, None if files is None else Tls(files))
    emit(found.to_json(), text=_peer_text(found))
    return EXIT_OK


def _peer_text(found: PeerDiagnosis) -> str:
    return "\n".join(
        [
            f"{found.address} port {found.port}: a daemon that keeps copies of other hosts' memory",
            f"  connection from {found.source}: {1000 * found.connect_seconds:.1f} ms",
            f"  answer: {1000 * found.answer_seconds:.1f} ms",
            "reachable; it refuses hosts without the job's secret",
        ]
    )


def _text(found: Diagnosis) -> str:
    content = "contains a store" if found.has_store else "contains no store yet"
    lines = [f"{found.where}: {'a local folder' if found.local else 'remote'}, {content}"]
    lines += [
        f"  {'ok  ' if check.ok else 'FAIL' if check.needed else 'warn'}  {check.name}: {check.detail}"
        for check in found.checks
    ]
    for name, latency in (("small put", found.small_put_seconds), ("small get", found.small_get_seconds)):
        if latency is not None:
            lines.append(f"  {name}: median {1000 * latency.median:.1f} ms, p95 {1000 * latency.p95:.1f} ms")
    for name, bandwidth in (("write", found.write_bytes_per_second), ("read", found.read_bytes_per_second)):
        if bandwidth is not None:
            lines.append(f"  {name}: {human_bytes(bandwidth)}/s")
    lines += [f"  could not be deleted: {name}" for name in found.left_behind]
    return "\n".join([*lines, _meaning(found)])


def _meaning(found: Diagnosis) -> str:
    if not found.exclusive:
        return (
            "two writers would overwrite each other's commits here: scarctl refuses the place without "
            "--assume-single-writer"
        )
    if not found.sound:
        return "unsafe: committed checkpoints might not be found again. Do not use this place"
    if found.local:
        return "safe: a lock admits one writer at a time; a commit is durable when it returns"
    return (
        "safe without a lock: a second writer takes over, and the first one notices at its next commit; "
        "acknowledged checkpoints are never lost"
    )

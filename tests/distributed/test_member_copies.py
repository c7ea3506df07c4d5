"""Test members whose hosts find each other through the store: no process group, real daemons, folders as hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import scarctl
from scarctl.arena.view import ArenaView, peek
from scarctl.cli.main import cli
from scarctl.errors import UsageError
from scarctl.ops.survey import survey
from scarctl.state.version import step_of
from scarctl.store import Store, verify
from scarctl.store.hosts import HOSTS, HostRecord, host_path, read_hosts
from tests.support.copied_member import INTERVAL, Hosts, hosts
from tests.support.forkserver import Program
from tests.support.member import ROWS, state_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield hosts, without a member so far."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    with hosts(tmp_path, tmp_path / "store") as made:
        yield made


@pytest.fixture
def two(alone: Hosts) -> Hosts:
    """Return hosts: member 0 trains on "east", member 1 on "west", and each has a copy on the other's host."""
    return both(alone)


def both(hosts: Hosts) -> Hosts:
    """Start two members on a host each, and wait until each has a copy on the other's."""
    for number, home in ((0, "east"), (1, "west")):
        hosts.start(number, home)
    for number, home in ((0, "east"), (1, "west")):
        hosts.until_copied(number, home)
    return hosts


def records(hosts: Hosts) -> dict[str, HostRecord]:
    """Return the records in the store by the name of the host."""
    found = read_hosts(Store.open(hosts.store)).values()
    return {record.host.rpartition(":")[2]: record for record in found}


def put(hosts: Hosts, place: str, data: bytes) -> None:
    folder = Path(hosts.store) / HOSTS
    folder.mkdir(parents=True, exist_ok=True)
    (Path(hosts.store) / host_path(place)).write_bytes(data)


def scarctl_command(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def memory_of(hosts: Hosts, number: int, home: str) -> ArenaView:
    """Return a member's memory on a host: its own, or a copy."""
    found = peek(str(hosts.home(home)), Store.open(hosts.store).of_shard(number).run_id)
    assert found is not None
    return found


def bound(listener: socket.socket, address: str, port: int) -> bool:
    try:
        listener.bind((address, port))
    except OSError:
        return False
    return True


def until_head(hosts: Hosts, number: int, home: str, more: int = 20) -> int:
    """Wait until a member has taken some more steps, and return its step then."""
    goal = hosts.run_of(number, home).get("head_step", 0) + more
    wait_until(lambda: hosts.run_of(number, home).get("head_step", 0) >= goal)
    return goal


# -- a host dies --------------------------------------------------------------------------------------------------


def test_a_host_dies_and_its_member_starts_on_another(alone: Hosts) -> None:
    """The store has had nothing for some time. What the other host has is two intervals older than the memory, at most.

    Training is so slow that even a busy machine sends a copy within an interval, of 1 s.
    """
    alone.options |= {"pace": 0.5}
    two = both(alone)
    two.order(0, "stop store")
    until_head(two, 0, "east", 4 * INTERVAL)
    two.programs[0].send_signal(signal.SIGSTOP)
    memory = step_of(memory_of(two, 0, "east").version)
    two.lose("east", 0)
    behind = memory - step_of(memory_of(two, 0, "west").version)
    assert behind.min() >= 0
    assert behind.max() <= 2 * INTERVAL, behind
    found = two.start(0, "north")
    assert found["tiers"].keys() == {"peer"}, found
    assert found["step"] >= memory.max() - 2 * INTERVAL
    assert found["torn"] == 0
    assert two.end(0) == two.end(1) == 0
    store = Store.open(two.store)
    assert verify(store, read_data=True).problems == []


def test_after_a_flush_that_the_other_host_has_it_is_exact(two: Hosts) -> None:
    two.order(0, "stop store")
    until_head(two, 0, "east", 10)
    head = two.copy(0, stopped=True)
    two.lose("east", 0)
    found = two.start(0, "north")
    assert found == {"step": head, "exact": True, "tiers": {"peer": ROWS + 1}, "torn": 0}


def test_a_member_that_is_stopped_at_a_flush_is_exact_elsewhere(two: Hosts) -> None:
    two.order(0, "stop store")
    until_head(two, 0, "east", 10)
    two.programs[0].terminate()  # it flushes, and dies by the signal
    assert two.programs[0].wait() == -signal.SIGTERM
    wait_until(lambda: "west" in str(two.run_of(0, "east").get("peers", "west")))
    two.programs.pop(0)
    found = two.start(0, "north")
    assert (found["exact"], found["tiers"].keys()) == (True, {"peer"}), found
    assert two.end(0) == 0


def test_a_member_whose_process_died_fetches_its_own_memory(two: Hosts) -> None:
    """Its host lives. The memory there is newer than the copy of it."""
    two.order(0, "stop store")
    until_head(two, 0, "east")
    two.kill(0)
    step = two.run_of(0, "east").get("head_step", 0)
    found = two.start(0, "north")
    assert found["step"] >= step - 2 * INTERVAL
    assert found["tiers"].keys() <= {"peer", "store"}, "a dead process's daemon may save it meanwhile"


def test_a_member_that_comes_back_to_its_host_has_its_own_memory(two: Hosts) -> None:
    for _ in range(2):
        two.order(0, "stop store")
        until_head(two, 0, "east")
        two.kill(0)
        found = two.start(0, "east")
        assert "memory" in found["tiers"], found
        two.until_copied(0, "east")
    assert two.copies_on("west") == [Store.open(two.store).of_shard(0).run_id]


def test_a_member_goes_to_another_host_and_back(two: Hosts) -> None:
    """What its first host still has of its own is older than the copy, wherever that is."""
    two.kill(0)
    assert two.start(0, "north")["step"] > 0
    two.until_copied(0, "north")
    two.order(0, "stop store")
    head = two.copy(0)
    two.lose("north", 0)
    here = Store.open(two.store).of_shard(0).run_id in two.copies_on("east")
    found = two.start(0, "east")
    assert found["step"] >= head
    assert found["tiers"].keys() == {"memory" if here else "peer"}, found


def test_two_copies_survive_two_hosts(alone: Hosts) -> None:
    alone.count = 3
    alone.options |= {"peers": 2, "peer_ack": "all"}
    for number, home in enumerate(("east", "west", "south")):
        alone.start(number, home)
    for number, home in enumerate(("east", "west", "south")):
        assert len(alone.until_copied(number, home, 2)) == 2
    for number in (0, 1):
        alone.order(number, "stop store")
    heads = [alone.copy(number) for number in (0, 1)]
    alone.lose("east", 0)
    alone.lose("west", 1)
    for number in (0, 1):
        found = alone.start(number, "north")
        assert found["tiers"].keys() == {"peer"}, found
        assert found["step"] >= heads[number]


# -- the secret ---------------------------------------------------------------------------------------------------


def test_without_a_secret_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need the file of a secret") as caught:
        scarctl.attach(
            state_of(0),
            store=tmp_path / "store",
            member=(0, 2),
            settings=scarctl.Settings(peers=1, daemon=True),
        )
    assert "openssl rand -hex 32 > peer-secret" in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("content", ["", "short", None])
def test_a_file_without_a_good_secret_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    for peers in (0, 1):
        with pytest.raises(UsageError, match="secret's file"):
            scarctl.attach(
                state_of(0),
                store=tmp_path / "store",
                member=(0, 2),
                settings=scarctl.Settings(peers=peers, daemon=True if peers else None, peer_secret_file=path),
            )
    assert not (tmp_path / "store").exists()


def test_a_host_with_another_secret_gets_no_copy(alone: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another-0123456789abcdef-0123456789abcdef")
    other.chmod(0o600)
    alone.start(0, "east")
    alone.start(1, "west", peer_secret_file=str(other))
    wait_until(lambda: any("does not have this job's secret" in line for line in alone.warned(0)), 60)
    wait_until(lambda: any("does not have this job's secret" in line for line in alone.warned(1)), 60)
    assert alone.copies_on("west") == alone.copies_on("east") == []
    alone.lose("east", 0)
    assert "peer" not in alone.start(0, "north", peer_secret_file=str(other))["tiers"]
    text = "".join(str(line) for number in (0, 1) for line in alone.told(number))
    assert "0123456789abcdef-0123456789abcdef" not in text


# -- records ------------------------------------------------------------------------------------------------------


def test_what_hosts_write_about_themselves(two: Hosts) -> None:
    found = records(two)
    assert found.keys() == {"east", "west"}
    assert found["east"].place != found["west"].place
    assert {record.address for record in found.values()} == {"127.0.0.1"}
    wait_until(lambda: records(two)["east"].to == (found["west"].place,))
    before = found["east"].written
    wait_until(lambda: records(two)["east"].written > before)
    assert len(list((Path(two.store) / HOSTS).iterdir())) == 2


def test_several_members_of_one_host_write_one_record(alone: Hosts) -> None:
    alone.count = 3
    for number, home in enumerate(("east", "east", "west")):
        alone.start(number, home)
    for number, home in enumerate(("east", "east", "west")):
        alone.until_copied(number, home)
    assert records(alone).keys() == {"east", "west"}
    assert len(alone.copies_on("west")) == 2
    assert len(alone.copies_on("east")) == 1


def test_hostile_records_cost_nothing(alone: Hosts) -> None:
    """Garbage, a huge file, an address that accepts and never answers, one that is gone, and one of nobody."""
    Store.create(alone.store, rows={"rows": 1})
    with closing(socket.create_server(("127.0.0.1", 0))) as mute, closing(socket.socket()) as gone:
        gone.bind(("127.0.0.1", 0))
        ports = mute.getsockname()[1], gone.getsockname()[1]
        now = int(time.time())
        for number, (address, port) in enumerate(
            [("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), ("192.0.2.7", 9)]
        ):
            place = f"{number:016x}"
            put(alone, place, HostRecord(place, f"evil {number}", "", address, port, False, now).data)
        put(alone, "a" * 16, b"\xff" * 100)
        put(alone, "b" * 16, b"[" * (1 << 20))
        put(alone, "c" * 16, b'{"kind":"host"}')
        begun = alone.start(0, "east")
        assert begun == {"step": 0, "exact": True, "tiers": {}, "torn": 0}
        alone.start(1, "west")
        # Those that do not answer are given up after some time, and asked last from then on.
        alone.until_copied(0, "east")
        alone.until_copied(1, "west")
        assert alone.end(0) == alone.end(1) == 0


def test_a_record_of_a_host_that_is_gone_does_not_hinder(two: Hosts) -> None:
    """Its record is there for a day, and so are replicas on other hosts."""
    before = records(two)["west"]
    two.lose("west", 1)
    wait_until(lambda: any("not kept up to date" in line for line in two.warned(0)), 60)
    assert two.start(1, "south")["tiers"].keys() <= {"peer", "store"}
    assert records(two)["west"].port == before.port
    two.until_copied(1, "south")
    two.until_copied(0, "east")
    wait_until(lambda: "south" in str(two.run_of(0, "east").get("peers")), 120)
    two.until_copied(0, "east")


def test_the_record_follows_a_daemon_that_is_replaced(two: Hosts) -> None:
    """Another process has taken its port meanwhile."""
    before = records(two)["west"]
    two.programs[1].send_signal(signal.SIGSTOP)
    two.kill_daemon("west")
    with closing(socket.socket()) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: bound(taken, before.address, before.port))  # once the last connection is closed
        taken.listen()
        two.programs[1].send_signal(signal.SIGCONT)
        wait_until(lambda: records(two)["west"].port != before.port)
        two.order(0, "stop store")
        head = two.copy(0)
    two.lose("east", 0)
    found = two.start(0, "north")
    assert found["tiers"].keys() == {"peer"}
    assert found["step"] >= head


def test_the_store_goes_away_and_comes_back(two: Hosts) -> None:
    """Training and copies continue. A caveat says that this host cannot be found."""
    store, away = Path(two.store), Path(two.store).with_name("away")
    store.rename(away)
    wait_until(lambda: any(kind == "peer-record" for kind, _, _ in two.order(0, "caveats")["answer"]))
    until_head(two, 0, "east")
    two.copy(0)
    assert not store.exists(), "nothing makes the folder again"
    assert [inexact for kind, _, inexact in two.order(0, "caveats")["answer"] if "peer" in kind] == [False]
    away.rename(store)
    wait_until(lambda: not any("peer" in kind for kind, _, _ in two.order(0, "caveats")["answer"]))
    assert two.end(0) == two.end(1) == 0


# -- what users see -----------------------------------------------------------------------------------------------


def test_without_another_host_a_warning_says_so_until_one_has_a_copy(alone: Hosts) -> None:
    alone.options["seconds"] |= {"_ALONE": 1.0}
    alone.start(0, "east")
    wait_until(lambda: alone.run_of(0, "east").get("peers") == ["no host yet: absent"])
    text = "peers=1, but no other host can yet keep copies of this host's memory"
    wait_until(lambda: text in alone.warned(0))
    assert ["peers", text, False] in alone.order(0, "caveats")["answer"]
    alone.start(1, "west")
    alone.until_copied(0, "east")
    wait_until(lambda: alone.order(0, "caveats")["answer"] == [])
    assert alone.warned(0).count(text) == 1


def test_inspect_and_status_name_the_hosts(two: Hosts) -> None:
    def copies(home: str) -> list[Any]:
        lines = survey(Store.open(two.store), str(two.home(home))).ranks
        return [(line.replica_of or "", list(line.copies)) for line in lines]

    east, west = copies("east"), copies("west")
    assert "west" in str(east[0][1])
    assert "east" in str(west[1][1])
    assert ["west" in east[1][0], "east" in west[0][0]] == [True, True]


def test_a_forked_child_has_no_thread_and_changes_nothing(two: Hosts) -> None:
    names = two.order(0, "fork")["answer"]
    assert "scarctl-hosts" not in names
    two.copy(0)
    assert two.run_of(0, "east")["peers"]


def test_a_run_that_ends_leaves_no_copy(two: Hosts) -> None:
    assert two.end(0) == two.end(1) == 0
    wait_until(lambda: two.copies_on("east") == two.copies_on("west") == [])


# -- a host with notice -------------------------------------------------------------------------------------------


def test_an_evacuation_brings_a_member_to_the_other_host(two: Hosts) -> None:
    two.order(0, "stop store")
    found = two.order(0, "evacuate", 20.0, "west")["answer"]
    assert found["error"] == "unknown-host", "hosts have the names of their records"
    name = records(two)["west"].host
    found = two.order(0, "evacuate", 20.0, name)["answer"]
    assert found["peers"] == [name], found
    assert found["safe"], found


def test_the_command_evacuates_members(two: Hosts) -> None:
    two.order(0, "stop store")
    done = scarctl_command("evacuate", "--deadline", "20s", "--arena-dir", str(two.home("east")), "--json")
    assert done.exit_code == 0, done.output
    (store,) = json.loads(done.stdout)["stores"]
    assert [process["safe"] for process in store["processes"]] == [True]
    assert store["processes"][0]["peers"] == [records(two)["west"].host]


def test_after_sigterm_a_member_has_time_to_reach_the_other_host(alone: Hosts) -> None:
    alone.options["grace"] = "20s"
    two = both(alone)
    two.order(0, "stop store")
    until_head(two, 0, "east", 4)
    two.programs[0].terminate()
    assert two.programs.pop(0).wait() == -signal.SIGTERM
    shutil.rmtree(two.home("east") / f"scarctl-{os.getuid()}" / Store.open(two.store).of_shard(0).run_id)
    found = two.start(0, "north")
    assert (found["exact"], found["tiers"].keys()) == (True, {"peer"}), found


# -- without a process --------------------------------------------------------------------------------------------


def test_a_lost_member_is_recovered_into_a_file_from_the_copy(two: Hosts, tmp_path: Path) -> None:
    two.order(0, "stop store")
    head = two.copy(0, stopped=True)
    two.lose("east", 0)
    output = tmp_path / "lost.safetensors"
    done = scarctl_command(
        *("recover", "--store", str(two.store), "--lost", "member:0", "--output", str(output)),
        *("--arena-dir", str(two.home("west")), "--json"),
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tiers"] == {"peer": ROWS + 1}
    assert (load_file(output)["rows@0"] == head).all()


def test_a_command_gives_its_member_copies(alone: Hosts, tmp_path: Path) -> None:
    """As with ranks: `scarctl run --peers 1`."""
    alone.start(1, "west")
    (alone.home("east")).mkdir()
    alone.homes.add("east")
    options = {name: value for name, value in alone.options.items() if name != "peers"}
    words = [str(alone.store), str(alone.told_in), "0", "2", json.dumps(options)]
    env = {**os.environ, "SCARCTL_ARENA_DIR": str(alone.home("east"))}
    command = ["-m", "scarctl", "run", "--peers", "1", "--", sys.executable, "-m"]
    program = Program([*command, "tests.support.copied_member", *words], env=env)
    alone.everyone.append(program)
    alone.until_copied(0, "east")
    (alone.told_in / "0.do").write_text('["end"]\n')
    assert program.wait(60) == 0


# -- another number of members ------------------------------------------------------------------------------------


def test_copies_of_members_that_are_replaced(alone: Hosts) -> None:
    """What only copies have is taken over. They are never taken for memory of the new members."""
    alone.options["divided"] = 48
    two = both(alone)
    for number in (0, 1):
        two.order(number, "stop store")
    heads = [two.copy(number, stopped=True) for number in (0, 1)]
    two.kill(0)  # the daemon saves what it has
    two.lose("west", 1)
    wait_until(lambda: two.run_of(0, "east") == {})
    begun = [two.start(n, home, count=3, replaces=2) for n, home in enumerate(("north", "east", "south"))]
    assert [line["exact"] for line in begun] == [False] * 3
    for number, line in enumerate(begun):
        steps = line["steps"]  # of each row, from the whole table's row 16 * number on
        assert steps == [heads[(16 * number + row) // 24] for row in range(16)], number
    new = {Store.open(two.store).of_shard(shard).run_id for shard in (2, 3, 4)}
    for number, home in enumerate(("north", "east", "south")):
        two.until_copied(number + 2, home)
    assert {run for home in ("north", "east", "south") for run in two.copies_on(home)} >= new
    two.count = 3
    two.order(2, "stop store")
    head = two.copy(2)
    two.kill_daemon("south")
    two.kill(2)
    shutil.rmtree(two.home("south"))
    found = two.start(2, "west", replaces=2)
    assert found["step"] >= head
    assert found["tiers"].keys() == {"peer"}

"""Test `scarctl verify`: intact stores, every kind of damage by file and partition, and what names and sizes show."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.cli import progress
from scarctl.store import Store, verify
from scarctl.store.shard_state import ShardState
from scarctl.store.subset import Subset
from scarctl.store.visible_damage import visible_damage
from tests.cli.conftest import Model, Run
from tests.support.logs import records


def segment(shard: int) -> Path:
    return max(Path(f"ckpt/lanes/{shard}/seg").iterdir(), key=lambda p: p.stat().st_mtime_ns)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)


def test_an_intact_store(run: Run, saved: Model) -> None:
    done = run("verify", "--store", "ckpt", "--json").document
    assert (done["command"], done["intact"], done["read_data"], done["problems"]) == (
        "verify",
        True,
        True,
        [],
    )
    assert done["records"] == 2
    assert run("verify", "--store", "ckpt").stdout.endswith(": intact\n")
    assert "data not read" in run("verify", "--store", "ckpt", "--no-read-data").stdout


def test_parts_of_the_data_are_all_of_it_together(run: Run, saved: Model) -> None:
    path = segment(0)
    flip(path)
    whole = run("verify", "--store", "ckpt", "--json", code=13).document["data_bytes"]
    store = Store.open("ckpt")
    reports = [
        verify(store, read_data=True, subset=Subset.parse(part))
        for part in ("1/3", "2/3", "3/3", "2/3", "1/3", "3/3")
    ]
    assert [r.data_bytes for r in reports[:3]] == [reports[k].data_bytes for k in (4, 3, 5)], (
        "always the same"
    )
    found = [problem for report in reports[:3] for problem in report.problems]
    read = sum(report.data_bytes for report in reports[:3])
    assert read == whole > 0
    assert [Path(problem.file).name for problem in found] == [path.name]
    everything = run("verify", "--store", "ckpt", "--read-data-subset", "100%", code=13).stdout
    assert everything.endswith(" of data read (100%)\n")


def test_flipped_data_names_file_and_partition(run: Run, saved: Model) -> None:
    path = segment(0)
    flip(path)
    done = run("verify", "--store", "ckpt", "--json", code=13).document
    assert not done["intact"]
    (problem,) = done["problems"]
    assert problem["file"].endswith(path.name)
    assert "[" in problem["partition"]
    assert "checksum" in problem["reason"]
    assert run("verify", "--store", "ckpt", "--json", "--no-read-data").document["intact"]
    text = run("verify", "--store", "ckpt", code=13)
    assert path.name in text.stdout
    assert ": 1 problem\n" in text.stdout


def test_the_advice_is_to_put_back_what_cannot_be_read_around(run: Run, saved: Model) -> None:
    flip(segment(0))
    assert "`scarctl recover` uses older intact copies" in run("verify", "--store", "ckpt", code=13).stderr
    record = records("ckpt")[-1]
    data = bytearray(record.read_bytes())
    data[40] ^= 1
    record.write_bytes(data)
    done = run("verify", "--store", "ckpt", code=13)
    assert "scarctl recover" not in done.stderr, "no other record has copies"
    assert str(record) in done.stderr
    assert "Put that file back from a copy of this store" in done.stderr
    lost = run("recover", "--store", "ckpt", "--lost", "all", "--output", "x.safetensors", code=16)
    assert str(record) in lost.stderr


def test_an_empty_store_is_not_intact(run: Run) -> None:
    """Nothing is damaged, and nothing can be recovered."""
    Store.create("ckpt")
    done = run("verify", "--store", "ckpt", "--json", code=16).document
    assert (done["intact"], done["empty"], done["problems"]) == (False, True, [])
    text = run("verify", "--store", "ckpt", code=16)
    assert text.stdout.endswith(": empty, nothing to verify\n")
    assert "nothing has been saved" in text.stderr


def test_progress_goes_to_stderr(run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000_000, 31))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    done = run("verify", "--store", "ckpt", "--json")
    assert done.document["intact"]
    assert "verified " in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [("export out", "exported "), ("recover --lost all --output out.safetensors", "restored ")],
)
def test_other_long_work_shows_progress_too(
    run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    now = iter(range(0, 10_000_000, 31))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    done = run(*words.split(), "--store", "ckpt")
    shown = [line for line in done.stderr.splitlines() if says in line]
    assert shown[-1].partition(says)[2].split(" of ")[0] == shown[-1].partition(" of ")[2], (
        "all of it, in the end"
    )


def look(place: str = "ckpt") -> dict[int, int]:
    """Return by shard the number of members whose newest copy is lost."""
    store = Store.open(place)
    return {
        shard: int(found.lost.sum())
        for shard, found in visible_damage(store, store.states(store.shards())).items()
    }


def segments(shard: int = 0) -> list[Path]:
    return sorted(Path("ckpt/lanes", str(shard), "seg").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_an_intact_store_has_none(saved: Model) -> None:
    assert look() == {}


@pytest.mark.parametrize("cut", [False, True])
def test_a_segment_that_is_missing_or_cut_short(run: Run, saved: Model, cut: bool) -> None:
    saved.train("emb")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1)
    state = Store.open("ckpt").state(0)
    older = state.version < state.version.max()
    assert 0 < older.sum() < len(older), "the newest record has a part of the copies"
    names = {state.segments[k].name for k in set(state.segment[older].tolist())}
    for path in segments():
        if path.name not in names:
            continue
        if cut:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    lost = int(older.sum())
    assert look() == {0: lost}
    fields = run("status", "ckpt", "--json", code=3).document["stores"][0]
    (finding,) = fields["findings"]
    assert (finding["severity"], finding["kind"]) == ("losing", "damaged")
    assert f"copies of {lost} partitions" in finding["message"]
    assert finding["command"] == "scarctl verify --store ckpt"
    assert fields["if_lost"]["process"]["partitions_without_copy"] == lost
    damage = run("inspect", "--store", "ckpt", "--json", code=3).document["damage"]
    reasons = {one["reason"] for one in damage}
    if cut:
        sizes = {path.stat().st_size for path in segments()}
        assert reasons <= {f"it has {size} bytes, its record says {size + 1}" for size in sizes}
    else:
        assert {reason.split(" ")[-1] for reason in reasons} == {"missing"}
    assert run("inspect", "--store", "ckpt", code=3).stdout.count("damaged: ") == len(damage)
    assert run("verify", "--store", "ckpt", code=13).stdout.count("seg/") >= len(damage)


def test_what_a_newer_record_supersedes_is_no_damage(
    run: Run, saved: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states were read before a writer saved everything again and collected the files that they need."""
    store = Store.open("ckpt")
    old = store.states(store.shards())
    saved.train()
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1, "--policy", "full")
    run("prune", "--store", "ckpt", "--keep-last", 1, "--yes")
    needed = {segment.name for segment in Store.open("ckpt").state(0).segments}
    for path in segments():
        if path.name not in needed:
            path.unlink()
    assert visible_damage(store, old) == {}

    def unchanged(_: Store, shard: int, *, around: bool) -> ShardState:
        return old[shard]

    monkeypatch.setattr(Store, "state", unchanged)
    assert set(visible_damage(store, old)) == set(store.shards()), "without a newer record they are damage"

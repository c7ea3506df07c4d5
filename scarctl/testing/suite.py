"""What every adapter must do. A test module of an adapter makes a subclass, and says how a training is made.

Each test runs whole trainings with real stores, in this process or in one that is killed, and compares bytes by a route
that goes past the adapter (`Training.values`). None needs a fixture but pytest's `tmp_path`.
"""

from __future__ import annotations

import contextlib
import unittest
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, StateGroup
from scarctl.errors import LayoutMismatch
from scarctl.layout import Layout
from scarctl.session import Session
from scarctl.store import Store
from scarctl.testing import residue
from scarctl.testing.child import run_and_kill
from scarctl.testing.seen import (
    Description,
    Recorder,
    Seen,
    adapter_of,
    describe,
    differing,
    digest,
    is_placeholder,
    layout_of,
    rows_of,
)
from scarctl.testing.training import Training

LAST = 6
"""Iterations of a whole run."""
RARELY = {"interval": 1000}
"""Nothing is saved but what a test asks for, and the first iteration."""
OFTEN = {"interval": 1, "fraction": 0.25}
"""Something is saved beside every iteration."""

Bytes = NDArray[np.uint8]
State = dict[tuple[str, str], Bytes]
_references: dict[tuple[type, str], dict[int, Seen]] = {}
"""What the uninterrupted run of a suite's variant saw: the same in every test."""


class Stop(Exception):
    """Ends a training from within."""


class AdapterConformance:
    """Tests of one adapter, beside one way of training with it. For pytest: name the subclass `Test...`.

    The subclass stands at the top of a module, since another process looks for it there.
    """

    generators: ClassVar[tuple[str, ...]] = ("python", "numpy", "torch")
    """Global random generators that the adapter saves, and from which the training draws in every iteration."""

    variants: ClassVar[frozenset[str]] = frozenset()
    """What else the adapter supports; `training` makes one of each:

    "non-contiguous", "0-dim", "empty", "bfloat16": a group with such a tensor;
    "tied": one parameter that `values` has under two names; "frozen": a value that training leaves as it is;
    "accumulation": an iteration has several backward passes; "several-optimizers": more than one steps in it.
    """

    def training(self, variant: str = "") -> Training:
        """A new training.

        variant: "", one of `variants`, or "changed": a model whose groups have other names or shapes.
        """
        raise NotImplementedError

    # -- the training itself ------------------------------------------------------------------------------------

    def test_the_training_is_one_that_shows_something(self, tmp_path: Path) -> None:
        """The same in every run, and nothing stands still: else the other tests would prove little."""
        expected = self._uninterrupted(tmp_path)
        assert list(expected) == list(range(LAST + 1)), f"visit() was called after iterations {list(expected)}"
        self._check_same(expected, self._run(tmp_path / "again", LAST).seen, "two runs are not the same")
        before, after = expected[LAST - 1], expected[LAST]
        still = {name for name, value in before.values.items() if after.values[name] == value}
        assert still < set(before.values), "training changes no values"
        still = {name for name, state in before.generators.items() if after.generators[name] == state}
        assert not still, f"training draws nothing from {sorted(still)}: see `generators`"

    # -- layout -------------------------------------------------------------------------------------------------

    def test_the_layout_is_stable(self, tmp_path: Path) -> None:
        """Names, order, shapes and dtypes: over iterations, over restarts, in another process."""
        run = self._run(tmp_path, LAST, at={2: _check_groups, LAST: _check_groups})
        first = run.layouts[1]
        self._check_layouts(run.layouts, first)
        self._check_layouts(self._run(tmp_path, LAST + 2).layouts, first)  # goes on
        again = self._run(tmp_path / "again", 2)
        self._check_layouts(again.layouts, first)
        _, layouts = self._killed(tmp_path / "other", "flush", after=2, die_after=2, hash_seed=1)
        self._check_layouts(layouts, first)

    def _check_layouts(self, layouts: Mapping[int, Description], expected: Description) -> None:
        """All are `expected`; before the first iteration slots may be missing."""
        for step, layout in layouts.items():
            if step == 0:
                layout = [[*group[:-1], group[-1][:1]] for group in layout]
            wanted = [[*group[:-1], group[-1][:1]] for group in expected] if step == 0 else expected
            assert sorted(layout) == sorted(wanted), (
                f"after iteration {step} the groups are {layout}, they were {wanted}"
            )
            assert layout == wanted, f"after iteration {step} the groups are in another order"

    def test_slots_made_for_a_resume_can_be_taken_away(self, tmp_path: Path) -> None:
        """What `create_slots` makes is what a layout has, and gone without a trace when there is nothing to load."""
        self._run(tmp_path / "earlier", 2)
        layout = _stored_layout(tmp_path / "earlier" / "store")

        def make_and_remove(session: Session) -> None:
            adapter = adapter_of(session)
            before = describe(adapter)
            remove = adapter.create_slots(layout)
            made = {group.name: set(group.tensors) for group in adapter.groups()}
            for group in layout.groups:
                missing = {spec.slot for spec in group.tensors} - made[group.name]
                assert not missing, f"create_slots() has not made {sorted(missing)} of {group.name}"
            remove()
            assert describe(adapter) == before, "what create_slots() returns does not take away all that it made"

        run = self._run(tmp_path, LAST, at={0: make_and_remove})
        self._check_same(self._uninterrupted(tmp_path), run.seen, "slots that were taken away have an effect")

    # -- resuming -----------------------------------------------------------------------------------------------

    def test_resuming_a_closed_run_is_exact(self, tmp_path: Path) -> None:
        """The rest of the run is bit for bit that of a run that was not interrupted."""
        self._resumes_exactly(tmp_path)

    def test_resuming_a_killed_run_from_the_store_is_exact(self, tmp_path: Path) -> None:
        """SIGKILL two iterations after a whole checkpoint, and the host's memory is lost."""
        expected = self._uninterrupted(tmp_path)
        seen, _ = self._killed(tmp_path, "checkpoint", after=3, die_after=5, hash_seed=2, **RARELY)
        self._check_same(expected, seen, "the training is not the same in another process")
        run = self._run(tmp_path, LAST, arena_dir=str(_folder(tmp_path / "other host")))
        self._check_resumed(expected, run, 3)

    def test_what_was_flushed_survives_a_kill(self, tmp_path: Path) -> None:
        """`flush` brings the iteration into memory; SIGKILL right after it costs nothing."""
        expected = self._uninterrupted(tmp_path)
        self._killed(tmp_path, "flush", after=4, die_after=4, hash_seed=3, **RARELY)
        self._check_resumed(expected, self._run(tmp_path, LAST), 4)

    def test_a_snapshot_is_resumed_by_its_name(self, tmp_path: Path) -> None:
        """Whatever was saved after it."""
        self._run(tmp_path, 5, at={2: lambda session: session.snapshot("two")}, **OFTEN)
        run = self._run(tmp_path, LAST, resume={"snapshot": "two"}, **OFTEN)
        self._check_resumed(self._uninterrupted(tmp_path), run, 2)

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        """With LayoutMismatch, before it is trained. Nothing is changed, neither the model nor the store."""
        self._run(tmp_path, 3)
        before, other = _files(tmp_path / "store"), self.training("changed")
        values = {name: digest(value) for name, value in other.values().items()}
        recorder = Recorder(other, self.generators)
        try:
            self._train(other, recorder, tmp_path, 5)
        except LayoutMismatch:
            pass
        else:
            raise AssertionError('training("changed") goes on from a state that is not its own')
        assert not recorder.seen, "another model was trained before it was refused"
        now = {name: digest(value) for name, value in other.values().items() if name in values}
        assert now == values, f"a model that was refused has other values: {differing(values, now)}"
        assert _files(tmp_path / "store") == before, "a model that was refused has changed the store"
        self._check_resumed(self._uninterrupted(tmp_path), self._run(tmp_path, LAST), 3)

    # -- recovering in a running process ------------------------------------------------------------------------

    def test_partial_recovery_touches_only_the_lost_rows(self, tmp_path: Path) -> None:
        """They get the store's bytes. All other rows, the extras and the random numbers stay as they are."""
        training, saved = self.training(), {}

        def save(session: Session) -> None:
            session.checkpoint(full=True, wait=True)
            saved.update(rows_of(adapter_of(session)))
            assert _differing(saved, _stored(tmp_path / "store")) == [], "the store has other bytes than groups()"

        def lose_and_recover(session: Session) -> None:
            lost = _rows_of_shard(session, 1)
            assert 0 < sum(map(np.sum, lost.values())) < sum(map(len, lost.values())), "a shard has all rows, or none"
            before = rows_of(adapter_of(session))
            seen = Seen.of(training, self.generators)
            _spoil(adapter_of(session), lost)
            report = session.recover(lost=[1])
            assert report.restored_partitions == report.lost_partitions
            now = rows_of(adapter_of(session))
            for (name, slot), rows in now.items():
                mask = lost[name]
                which = f"{name}, slot {slot!r}" if slot else name
                assert np.array_equal(rows[~mask], before[name, slot][~mask]), f"rows not lost were changed: {which}"
                assert np.array_equal(rows[mask], saved[name, slot][mask]), f"lost rows were not restored: {which}"
            after = Seen.of(training, self.generators)
            assert after.extras == seen.extras, f"extras were changed: {differing(seen.extras, after.extras)}"
            assert after.generators == seen.generators, "random generators were changed"

        options = self._options(tmp_path, shards=2, **RARELY)
        recorder = Recorder(training, self.generators, {2: save, 4: lose_and_recover})
        training.run(tmp_path / "store", LAST, recorder, resume={}, options=options)
        assert list(recorder.seen) == list(range(LAST + 1)), "the training did not go on after a recovery"

    def test_all_values_of_a_group_are_recovered_together(self, tmp_path: Path) -> None:
        """Optimizer's slots go with their parameter: what `values` has comes back whole, what `extras` has stays."""
        self._recovers_all(tmp_path)

    def test_rolling_back_restores_values_extras_and_random_numbers(self, tmp_path: Path) -> None:
        """`recover("all", mode="rollback")`, in the running process."""
        training = self.training()

        def roll_back(session: Session) -> None:
            session.recover("all", mode="rollback")
            assert session.head_step == 2
            found = Seen.of(training, self.generators).differences(recorder.seen[2])
            assert not found, f"not as after iteration 2: {found}"
            raise Stop

        recorder = Recorder(training, self.generators, {2: _checkpoint, 4: roll_back})
        with _stopped():
            self._train(training, recorder, tmp_path, LAST, **RARELY)

    # -- faults -------------------------------------------------------------------------------------------------

    def test_a_store_that_fails_does_not_end_the_run(self, tmp_path: Path) -> None:
        """Nor make it another one. What was not saved waits in memory, and the next session goes on with it."""
        expected, store, away = self._uninterrupted(tmp_path), tmp_path / "store", tmp_path / "unmounted"
        options = {**OFTEN, "on_error": "warn", "drain_timeout": 0.5}
        run = self._run(tmp_path, 4, at={2: lambda _: _move(store, away)}, **options)
        self._check_same(expected, run.seen, "a store that fails makes training another one")
        _move(away, store)
        self._check_resumed(expected, self._run(tmp_path, LAST, **OFTEN), 4)

    def test_an_exception_in_the_loop_comes_through(self, tmp_path: Path) -> None:
        """It closes the session, and the next one resumes where it was raised."""

        def stop(session: Session) -> None:
            raise Stop

        training = self.training()
        recorder = Recorder(training, self.generators, {3: stop})
        before = residue.residue(tmp_path)
        with _stopped():
            self._train(training, recorder, tmp_path, LAST, **OFTEN)
        left = [what for what in residue.left_behind(before, tmp_path / "arena") if what.startswith("1 x thread")]
        assert not left, f"an exception has left behind: {left}"
        del training, recorder
        self._check_resumed(self._uninterrupted(tmp_path), self._run(tmp_path, LAST, **OFTEN), 3)

    # -- iterations ---------------------------------------------------------------------------------------------

    def test_hooks_are_called_around_every_iteration(self, tmp_path: Path) -> None:
        """`before` before anything is changed, `after` once, when all is; and no more once they are removed."""
        self._calls_hooks(tmp_path)

    # -- after the end ------------------------------------------------------------------------------------------

    def test_nothing_refers_to_a_closed_session(self, tmp_path: Path) -> None:
        """A hook that was forgotten does."""
        training = self.training()
        recorder = Recorder(training, self.generators)
        self._train(training, recorder, tmp_path, 3, **OFTEN)
        assert recorder.session is not None
        alive = residue.survivors({"session": recorder.session})
        assert not alive, f"still there while the model is: {alive}"

    def test_nothing_of_the_training_outlives_it(self, tmp_path: Path) -> None:
        """What the attributes of the training refer to is freed: models are large."""
        references = self._references(tmp_path)
        assert references, "the training has no attributes that can be watched"
        alive = residue.survivors(references)
        assert not alive, f"still there after the training: {alive}"

    def _references(self, tmp_path: Path) -> dict[str, weakref.ref[Any]]:
        training = self.training()
        self._train(training, Recorder(training, self.generators), tmp_path, 3, **OFTEN)
        return residue.referred_to(training)

    def test_runs_one_after_the_other_leave_nothing_in_the_process(self, tmp_path: Path) -> None:
        """No threads, signal handlers, open files, callbacks at exit, files in the arena's folder."""
        expected = self._uninterrupted(tmp_path)
        self._run(tmp_path, 2, **OFTEN)  # what is made once per process is made here
        residue.survivors({})
        before = residue.residue(tmp_path / "arena")
        for until in (4, LAST):
            self._check_resumed(expected, self._run(tmp_path, until, **OFTEN), until - 2)
            residue.survivors({})
            left = residue.left_behind(before, tmp_path / "arena")
            assert not left, f"left behind: {left}"

    # -- what not every adapter supports ------------------------------------------------------------------------

    def test_tensors_that_are_not_contiguous(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "non-contiguous", lambda t: not t.is_contiguous() and not is_placeholder(t))

    def test_tensors_without_dimensions(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "0-dim", lambda t: t.dim() == 0)

    def test_tensors_without_elements(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "empty", lambda t: t.numel() == 0)

    def test_tensors_of_a_dtype_that_numpy_lacks(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "bfloat16", lambda t: t.dtype == torch.bfloat16)

    def test_tied_parameters(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "tied", lambda t: True)
        values = list(self._uninterrupted(tmp_path, "tied")[LAST].values.values())
        assert len(set(values)) < len(values), 'training("tied") has no two values that are the same'

    def test_frozen_parameters(self, tmp_path: Path) -> None:
        self._supports(tmp_path, "frozen", lambda t: True)
        seen = self._uninterrupted(tmp_path, "frozen")
        same = [name for name, value in seen[1].values.items() if seen[LAST].values[name] == value]
        assert same, 'training("frozen") has no value that stays'

    def test_several_backward_passes_are_one_iteration(self, tmp_path: Path) -> None:
        self._counts(tmp_path, "accumulation")

    def test_several_optimizers_are_one_iteration(self, tmp_path: Path) -> None:
        self._counts(tmp_path, "several-optimizers")

    # -- what several tests do ----------------------------------------------------------------------------------

    def _supports(self, tmp_path: Path, variant: str, has: Callable[[torch.Tensor], bool]) -> None:
        self._need(variant)

        def look(session: Session) -> None:
            groups = adapter_of(session).groups()
            assert any(has(t) for group in groups for t in group.tensors.values()), (
                f"training({variant!r}) has no such tensor"
            )
            _check_groups(session)

        self._run(tmp_path / "look", 2, variant=variant, at={2: look})
        self._resumes_exactly(tmp_path, variant)
        self._recovers_all(tmp_path / "recovery", variant)

    def _counts(self, tmp_path: Path, variant: str) -> None:
        self._need(variant)
        self._resumes_exactly(tmp_path, variant)
        with contextlib.suppress(unittest.SkipTest):
            self._calls_hooks(tmp_path / "hooks", variant)

    def _need(self, variant: str) -> None:
        if variant not in self.variants:
            raise unittest.SkipTest(f"`variants` does not name {variant!r}")

    def _resumes_exactly(self, tmp_path: Path, variant: str = "") -> None:
        self._run(tmp_path, 3, variant=variant, **OFTEN)
        run = self._run(tmp_path, LAST, variant=variant, **OFTEN)
        self._check_resumed(self._uninterrupted(tmp_path, variant), run, 3)

    def _recovers_all(self, tmp_path: Path, variant: str = "") -> None:
        training = self.training(variant)

        def recover(session: Session) -> None:
            adapter = adapter_of(session)
            _spoil(adapter, {group.name: np.ones(_count(group), bool) for group in adapter.groups()})
            session.recover("all")
            then, now, newest = recorder.seen[2], Seen.of(training, self.generators), recorder.seen[4]
            other = differing(then.values, now.values)
            assert not other, f"values that are not as they were saved: {other}"
            assert now.extras == newest.extras, f"extras were changed: {differing(newest.extras, now.extras)}"
            raise Stop

        recorder = Recorder(training, self.generators, {2: _checkpoint, 4: recover})
        with _stopped():
            self._train(training, recorder, tmp_path, LAST, **RARELY)

    def _calls_hooks(self, tmp_path: Path, variant: str = "") -> None:
        training = self.training(variant)
        calls: list[tuple[str, dict[tuple[str, str], str]]] = []
        remove: list[Callable[[], None]] = []

        def called(name: str, session: Session) -> None:
            groups = [group for group in adapter_of(session).groups() if group.kind == "parameter"]
            slots = {(group.name, slot): tensor for group in groups for slot, tensor in group.tensors.items()}
            state = {key: digest(tensor) for key, tensor in slots.items() if not is_placeholder(tensor)}
            calls.append((name, state))

        def begin(session: Session) -> None:
            if not adapter_of(session).automatic:
                raise unittest.SkipTest("the loop says itself when an iteration is over")
            remove.append(
                adapter_of(session).install(lambda: called("before", session), lambda: called("after", session))
            )
            called("visit", session)

        def end(session: Session) -> None:
            called("visit", session)
            remove.pop()()

        at = {step: lambda session: called("visit", session) for step in range(1, LAST - 1)}
        recorder = Recorder(training, self.generators, {**at, 0: begin, LAST - 1: end})
        self._train(training, recorder, tmp_path, LAST)
        names = [name for name, _ in calls]
        ends = [i for i, name in enumerate(names) if name == "visit"]
        assert ends[-1] == len(names) - 1, "hooks that were removed are called"
        for step, (first, last) in enumerate(zip(ends, ends[1:], strict=False), start=1):
            *befores, after = names[first + 1 : last] or [""]
            assert after == "after" and befores and set(befores) == {"before"}, (
                f"iteration {step} called the hooks {names[first + 1 : last]}, not before (at least once) and after (once)"
            )
            changed = differing(calls[first][1], calls[first + 1][1])
            assert not changed, f"`before` of iteration {step} comes when these have been changed: {changed}"
            changed = differing(calls[last][1], calls[last - 1][1])
            assert not changed, f"`after` of iteration {step} comes before these are changed: {changed}"

    def _uninterrupted(self, tmp_path: Path, variant: str = "") -> dict[int, Seen]:
        """What a run that nothing interrupts sees after every iteration."""
        key = type(self), variant
        if key not in _references:
            _references[key] = self._run(tmp_path / "uninterrupted", LAST, variant=variant).seen
        return _references[key]

    def _run(
        self,
        folder: Path,
        until: int,
        *,
        variant: str = "",
        at: Mapping[int, Callable[[Session], object]] | None = None,
        resume: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Recorder:
        """A new training, run to its end."""
        training = self.training(variant)
        recorder = Recorder(training, self.generators, at)
        self._train(training, recorder, folder, until, resume=resume, **options)
        return recorder

    def _train(
        self,
        training: Training,
        visit: Recorder,
        folder: Path,
        until: int,
        *,
        resume: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        training.run(
            folder / "store", until, visit, resume=resume or {}, options=self._options(folder, **options)
        )

    def _options(self, folder: Path, **more: Any) -> dict[str, Any]:
        """Every row is a partition; what fails while saving is raised; nothing is outside of `folder`."""
        fixed = {"rows": {"*": 1}, "daemon": False, "on_error": "raise", "drain_timeout": 30.0}
        return {**fixed, "arena_dir": str(_folder(folder / "arena")), **more}

    def _killed(
        self, folder: Path, action: str, *, after: int, die_after: int, hash_seed: int, **options: Any
    ) -> tuple[dict[int, Seen], dict[int, Description]]:
        return run_and_kill(
            type(self),
            _folder(folder) / "store",
            action=action,
            after=after,
            die_after=die_after,
            options=self._options(folder, **options),
            hash_seed=hash_seed,
        )

    def _check_resumed(self, expected: Mapping[int, Seen], run: Recorder, start: int) -> None:
        """`run` began after iteration `start`, with what it had been then, and went on like `expected`."""
        assert run.start == start, f"the run resumed after iteration {run.start}, not {start}"
        first, *rest = run.seen
        # Random generators may be drawn from while a framework gets ready; then they are restored later.
        for kind, wanted, found in (
            ("values", expected[first].values, run.seen[first].values),
            ("extras", expected[first].extras, run.seen[first].extras),
        ):
            assert found == wanted, f"{kind} that were not restored: {differing(wanted, found)}"
        self._check_same(expected, {step: run.seen[step] for step in rest}, "after a resume it is another run")

    def _check_same(self, expected: Mapping[int, Seen], found: Mapping[int, Seen], what: str) -> None:
        for step, seen in found.items():
            other = expected[step].differences(seen)
            assert not other, f"{what}: after iteration {step} these differ: {other}"


# -- stores ------------------------------------------------------------------------------------------------------


def _checkpoint(session: Session) -> None:
    session.checkpoint(full=True, wait=True)


def _stored_layout(store: Path) -> Layout:
    opened = Store.open(store)
    with contextlib.closing(opened):
        layout = opened.current_layout()
    assert layout is not None
    return layout


def _stored(store: Path) -> State:
    """The bytes in a store, by (group, slot)."""
    opened = Store.open(store)
    with contextlib.closing(opened):
        layout = opened.current_layout()
        assert layout is not None
        found = {
            (group.name, spec.slot): np.zeros((spec.rows, spec.row_bytes), np.uint8)
            for group in layout.groups
            for spec in group.tensors
        }
        damaged: list[Any] = []
        for state in opened.states(opened.shards()).values():
            for batch in opened.read(state, state.ids[state.saved], corrupt=damaged):
                group = layout.groups[batch.group]
                starts, stops = layout.row_ranges(batch.ids)
                rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
                for spec, data in zip(group.tensors, batch.tensors, strict=True):
                    found[group.name, spec.slot][rows] = data
    assert not damaged, f"the store is damaged: {damaged}"
    return found


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _move(source: Path, target: Path) -> None:
    source.rename(target)


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """The training inside is ended by `Stop`."""
    try:
        yield
    except Stop:
        return
    raise AssertionError("run() has swallowed an exception")


# -- groups ------------------------------------------------------------------------------------------------------


def _differing(a: State, b: State) -> list[tuple[str, str]]:
    return [key for key in {**a, **b} if key not in a or key not in b or not np.array_equal(a[key], b[key])]


def _check_groups(session: Session) -> None:
    """What holds for the groups of any adapter."""
    groups = adapter_of(session).groups()
    names = [group.name for group in groups]
    assert len(set(names)) == len(names), f"two groups have the same name: {names}"
    for group in groups:
        assert next(iter(group.tensors)) == "", f"{group.name}: the parameter is not the first of its tensors"
        shapes = {tuple(tensor.shape) for tensor in group.tensors.values()}
        assert len(shapes) == 1, f"{group.name}: its tensors have the shapes {shapes}"
    buffers = {group.name: group.tensors[""] for group in groups if group.kind == "buffer"}
    found = adapter_of(session).buffers()
    assert differing(_digests(buffers), _digests(found)) == [], (
        f"buffers() gives {sorted(found)}, groups() has {sorted(buffers)}, or they have other values"
    )
    _check_memory(groups)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _check_memory(groups: list[StateGroup]) -> None:
    """No two tensors begin at the same byte: what is restored in one would be changed in the other."""
    seen: dict[int, str] = {}
    for group in groups:
        for slot, tensor in group.tensors.items():
            if tensor.numel() and not is_placeholder(tensor):
                other = seen.setdefault(tensor.data_ptr(), f"{group.name}/{slot}")
                assert other == f"{group.name}/{slot}", (
                    f"{other} and {group.name}/{slot} are the same memory"
                )


def _count(group: StateGroup) -> int:
    tensor = group.tensors[""]
    return tensor.shape[0] if tensor.dim() else 1


def _rows_of_shard(session: Session, shard: int) -> dict[str, NDArray[np.bool_]]:
    """Which rows of every group are of a shard: bool of shape (rows,)."""
    layout = layout_of(session)
    masks = {group.name: np.zeros(group.rows, bool) for group in layout.groups}
    ids = np.flatnonzero(session.store.shard_of(layout) == shard)
    for g, start, stop in zip(layout.group_of(ids), *layout.row_ranges(ids), strict=True):
        masks[layout.groups[g].name][start:stop] = True
    return masks


def _spoil(adapter: Adapter, lost: Mapping[str, NDArray[np.bool_]]) -> None:
    """Fill lost rows with what no training makes."""
    with torch.no_grad():
        for group in adapter.groups():
            rows = torch.from_numpy(lost[group.name])
            for tensor in group.tensors.values():
                if is_placeholder(tensor) or not tensor.numel():
                    continue
                if tensor.dim():
                    tensor[rows.to(tensor.device)] = _garbage(tensor)
                elif rows.all():
                    tensor.fill_(_garbage(tensor))


def _garbage(tensor: torch.Tensor) -> float | int:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 1

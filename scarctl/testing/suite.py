"""Test the requirements for every adapter. An adapter's test module defines a subclass with a method `training`.

Each test runs whole trainings with real stores, in this process or in one that is killed. It compares bytes through
`Training.values`, which does not use the adapter. The only fixture is pytest's `tmp_path`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import unittest
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scarctl.config import grouped
from scarctl.errors import LayoutMismatch
from scarctl.session.session import Session
from scarctl.state.torch_dtypes import opened
from scarctl.testing import leaks
from scarctl.testing.fingerprint import (
    Description,
    Recorder,
    Seen,
    adapter_of,
    describe,
    differing,
    digest,
    is_placeholder,
    rows_of,
)
from scarctl.testing.harness import LAST, OFTEN, RARELY, Runs, Stop, folder_at, layouts_here, stopped
from scarctl.testing.killed_runs import checkpoint
from scarctl.testing.store_bytes import (
    State,
    check_groups,
    differing_rows,
    files,
    row_count,
    rows_of_shard,
    sized,
    spoil,
    stored,
    stored_layout,
)


class AdapterConformance(Runs):
    """Tests of one adapter with one way of training. Name the subclass `Test...` for pytest.

    Define the subclass at the top level of a module: another process loads it from there.
    """

    # -- the training itself ------------------------------------------------------------------------------------

    def test_the_training_is_one_that_shows_something(self, tmp_path: Path) -> None:
        """Check that two runs are equal, and that every value and generator changes: otherwise the other tests prove
        little.
        """
        expected = self._uninterrupted(tmp_path)
        assert list(expected) == list(range(LAST + 1)), (
            f"visit() was called after iterations {list(expected)}"
        )
        self._check_same(expected, self._run(tmp_path / "again", LAST).seen, "two runs are not the same")
        before, after = expected[LAST - 1], expected[LAST]
        still = {name for name, value in before.values.items() if after.values[name] == value}
        assert still < set(before.values), "training changes no values"
        still = {name for name, state in before.generators.items() if after.generators[name] == state}
        assert not still, f"training draws nothing from {sorted(still)}: see `generators`"

    # -- resuming -----------------------------------------------------------------------------------------------

    def test_a_closed_run_continues_bit_for_bit(self, tmp_path: Path) -> None:
        """The rest of the run equals an uninterrupted run bit for bit."""
        self._resumes_exactly(tmp_path)

    def test_a_killed_run_continues_bit_for_bit(self, tmp_path: Path) -> None:
        """SIGKILL two iterations after a full checkpoint, with the arena lost, and right after a flush into the arena.
        Layout and training in the killed process equal those in this one."""
        expected = self._uninterrupted(tmp_path)
        stored, flushed = tmp_path / "stored", tmp_path / "flushed"
        for seen, layouts in self._killed(
            self._to_kill(stored, "checkpoint", after=3, die_after=5),
            self._to_kill(flushed, "flush", after=4, die_after=4),
        ):
            self._check_layouts(layouts, layouts_here[type(self)])
            self._check_same(expected, seen, "the training is not the same in another process")
        run = self._run(stored, LAST, arena_dir=str(folder_at(tmp_path / "other host")))
        self._check_resumed(expected, run, 3)
        self._check_resumed(expected, self._run(flushed, LAST), 4)

    def test_a_snapshot_is_resumed_by_its_name(self, tmp_path: Path) -> None:
        """Later checkpoints do not matter."""
        self._run(tmp_path, 5, at={2: lambda session: session.snapshot("two")}, **OFTEN)
        run = self._run(tmp_path, LAST, resume={"snapshot": "two"}, **OFTEN)
        self._check_resumed(self._uninterrupted(tmp_path), run, 2)

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        """With LayoutMismatch, before training. Neither the model nor the store changes."""
        self._run(tmp_path, 3)
        before, other = files(tmp_path / "store"), self.training("changed")
        values = {name: digest(value) for name, value in other.values().items()}
        recorder = Recorder(other, self.generators)
        try:
            self._train(other, recorder, tmp_path, 5)
        except LayoutMismatch:
            pass
        else:
            raise AssertionError('training("changed") resumes from a state that is not its own')
        assert not recorder.seen, "another model was trained before it was refused"
        now = {name: digest(value) for name, value in other.values().items() if name in values}
        assert now == values, f"a model that was refused has other values: {differing(values, now)}"
        assert files(tmp_path / "store") == before, "a model that was refused has changed the store"
        self._check_resumed(self._uninterrupted(tmp_path), self._run(tmp_path, LAST), 3)

    # -- layout -------------------------------------------------------------------------------------------------

    def test_the_layout_is_stable(self, tmp_path: Path) -> None:
        """Names, order, shapes and dtypes are equal over iterations and restarts."""
        run = self._run(tmp_path, LAST, at={2: check_groups, LAST: check_groups})
        first = run.layouts[1]
        self._check_layouts(run.layouts, first)
        self._check_layouts(self._run(tmp_path / "again", 2).layouts, first)
        self._check_layouts(self._run(tmp_path, LAST + 2).layouts, first)  # continues

    def _check_layouts(self, layouts: Mapping[int, Description], expected: Description) -> None:
        """Assert that all equal `expected`; before the first iteration slots may be missing."""
        for step, layout in layouts.items():
            if step == 0:
                layout = [[*group[:-1], group[-1][:1]] for group in layout]
            wanted = [[*group[:-1], group[-1][:1]] for group in expected] if step == 0 else expected
            assert sorted(layout) == sorted(wanted), (
                f"after iteration {step} the groups are {layout}, they were {wanted}"
            )
            assert layout == wanted, f"after iteration {step} the groups are in another order"

    def test_slots_made_for_a_resume_can_be_taken_away(self, tmp_path: Path) -> None:
        """`create_slots` makes the slots of a layout, and the function it returns removes them without a trace."""
        self._run(tmp_path / "earlier", 2)
        layout = stored_layout(tmp_path / "earlier" / "store")

        def make_and_remove(session: Session) -> None:
            adapter = adapter_of(session)
            before = describe(adapter)
            remove = adapter.create_slots(layout)
            made = {group.name: set(group.tensors) for group in adapter.groups()}
            for group in layout.groups:
                missing = {spec.slot for spec in group.tensors} - made[group.name]
                assert not missing, f"create_slots() has not created {sorted(missing)} of {group.name}"
            remove()
            assert describe(adapter) == before, (
                "the function returned by create_slots() does not remove all slots that it made"
            )

        run = self._run(tmp_path, LAST, at={0: make_and_remove})
        self._check_same(self._uninterrupted(tmp_path), run.seen, "removed slots have an effect")

    # -- recovering in a running process ------------------------------------------------------------------------

    def test_partial_recovery_touches_only_the_lost_rows(self, tmp_path: Path) -> None:
        """Lost rows get the store's bytes. All other rows, the extras and the random numbers stay as they are."""
        training = self.training()
        saved: State = {}

        def save(session: Session) -> None:
            session.checkpoint(full=True, wait=True)
            saved.update(rows_of(adapter_of(session)))
            assert differing_rows(saved, stored(tmp_path / "store")) == [], (
                "the store has other bytes than groups()"
            )

        def lose_and_recover(session: Session) -> None:
            lost = rows_of_shard(session, 1)
            assert 0 < sum(map(np.sum, lost.values())) < sum(map(len, lost.values())), (
                "a shard has all rows, or none"
            )
            before = rows_of(adapter_of(session))
            seen = Seen.of(training, self.generators)
            spoil(adapter_of(session), lost)
            report = session.recover(lost=[1])
            assert report.restored_partitions == report.lost_partitions
            now = rows_of(adapter_of(session))
            for (name, slot), rows in now.items():
                mask = lost[name]
                which = f"{name}, slot {slot!r}" if slot else name
                assert np.array_equal(rows[~mask], before[name, slot][~mask]), (
                    f"rows not lost were changed: {which}"
                )
                assert np.array_equal(rows[mask], saved[name, slot][mask]), (
                    f"lost rows were not restored: {which}"
                )
            after = Seen.of(training, self.generators)
            assert after.extras == seen.extras, f"extras were changed: {differing(seen.extras, after.extras)}"
            assert after.generators == seen.generators, "random generators were changed"

        options = self._options(tmp_path, shards=2, **RARELY)
        recorder = Recorder(training, self.generators, {2: save, 4: lose_and_recover})
        training.run(tmp_path / "store", LAST, recorder, resume={}, options=grouped(**options))
        assert list(recorder.seen) == list(range(LAST + 1)), "the training did not continue after a recovery"

    def test_all_values_of_a_group_are_recovered_together(self, tmp_path: Path) -> None:
        """Optimizer's slots return with their parameter: `values` are restored whole, `extras` stay."""
        self._recovers_all(tmp_path)

    def test_rolling_back_restores_values_extras_and_random_numbers(self, tmp_path: Path) -> None:
        """`recover("all", mode="rollback")`, in the running process."""
        training = self.training()

        def roll_back(session: Session) -> None:
            session.recover("all", mode="rollback")
            assert session.head_step == 2
            found = Seen.of(training, self.generators).differences(recorder.seen[2])
            assert not found, f"different from the state after iteration 2: {found}"
            raise Stop

        recorder = Recorder(training, self.generators, {2: checkpoint, 4: roll_back})
        with stopped():
            self._train(training, recorder, tmp_path, LAST, **RARELY)

    # -- faults -------------------------------------------------------------------------------------------------

    def test_a_store_that_fails_does_not_end_the_run(self, tmp_path: Path) -> None:
        """It does not change the run either. The next session continues from the unsaved copies in the arena."""
        expected, store, away = self._uninterrupted(tmp_path), tmp_path / "store", tmp_path / "unmounted"
        options = {**OFTEN, "on_error": "warn", "timeout": 0.5}
        run = self._run(tmp_path, 4, at={2: lambda _: store.rename(away)}, **options)
        self._check_same(expected, run.seen, "a store that fails changes the training")
        away.rename(store)
        self._check_resumed(expected, self._run(tmp_path, LAST, **OFTEN), 4)

    def test_an_exception_in_the_loop_comes_through(self, tmp_path: Path) -> None:
        """It closes the session, and the next one resumes: where it was raised, if hooks end iterations."""
        training, automatic = self.training(), []

        def stop(session: Session) -> None:
            automatic.append(adapter_of(session).automatic)
            raise Stop

        before = leaks.residue(tmp_path / "arena")
        with stopped():
            self._train(training, Recorder(training, self.generators, {3: stop}), tmp_path, LAST, **OFTEN)
        left = leaks.left_behind(before, tmp_path / "arena", "thread")
        assert not left, f"an exception has left behind: {left}"
        run = self._run(tmp_path, LAST, **OFTEN)
        if automatic[0]:
            self._check_resumed(self._uninterrupted(tmp_path), run, 3)

    # -- iterations ---------------------------------------------------------------------------------------------

    def test_hooks_are_called_around_every_iteration(self, tmp_path: Path) -> None:
        """`before` comes before any change, `after` once and last. Removed hooks are not called."""
        self._calls_hooks(tmp_path)

    # -- after the end ------------------------------------------------------------------------------------------

    def test_nothing_refers_to_a_closed_session(self, tmp_path: Path) -> None:
        """A forgotten hook would."""
        training = self.training()
        recorder = Recorder(training, self.generators)
        self._train(training, recorder, tmp_path, 3, **OFTEN)
        assert recorder.session is not None
        alive = leaks.survivors({"session": recorder.session})
        assert not alive, f"still referenced while the model lives: {alive}"

    def test_nothing_of_the_training_outlives_it(self, tmp_path: Path) -> None:
        """Objects that the training's attributes refer to are freed: models are large."""
        references = self._references(tmp_path)
        assert references, "the training has no attributes that can be watched"
        alive = leaks.survivors(references)
        assert not alive, f"still alive after the training: {alive}"

    def _references(self, tmp_path: Path) -> dict[str, weakref.ref[Any]]:
        training = self.training()
        self._train(training, Recorder(training, self.generators), tmp_path, 3, **OFTEN)
        return leaks.referred_to(training)

    def test_runs_one_after_the_other_leave_nothing_in_the_process(self, tmp_path: Path) -> None:
        """No threads, no open files, no files in the arena's folder. Every run checks signal handlers."""
        expected = self._uninterrupted(tmp_path)
        self._run(tmp_path, 2, **OFTEN)  # creates objects that are created once per process
        gc.collect()
        before = leaks.residue(tmp_path / "arena")
        for until in (4, LAST):
            self._check_resumed(expected, self._run(tmp_path, until, **OFTEN), until - 2)
            gc.collect()
            left = leaks.left_behind(before, tmp_path / "arena")
            assert not left, f"left behind: {left}"

    # -- optional features --------------------------------------------------------------------------------------

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

    def test_optimizer_state_of_another_shape(self, tmp_path: Path) -> None:
        """`training("factored")`: optimizer state outside groups is recovered with its lost parameters."""
        self._need("factored")
        training = self.training("factored")

        def recover(session: Session) -> None:
            adapter = adapter_of(session)
            for tensor in sized(opened(adapter.capture())):
                tensor.fill_(torch.nan)
            if all(bool(torch.isfinite(tensor).all()) for tensor in sized(opened(adapter.capture()))):
                raise unittest.SkipTest("capture() returns copies, or nothing that has a size")
            spoil(adapter, {group.name: np.ones(row_count(group), bool) for group in adapter.groups()})
            problems = session.recover("all").problems
            assert not problems, f"a recovery leaves something behind: {problems}"
            left = [t for t in sized(opened(adapter.capture())) if not torch.isfinite(t).all()]
            assert not left, "a recovery leaves something that is not finite in capture()"
            raise Stop

        recorder = Recorder(training, self.generators, {2: checkpoint, 4: recover})
        with stopped():
            self._train(training, recorder, tmp_path, LAST, **RARELY)

    # -- shared by several tests --------------------------------------------------------------------------------

    def _supports(self, tmp_path: Path, variant: str, has: Callable[[torch.Tensor], bool]) -> None:
        self._need(variant)

        def look(session: Session) -> None:
            groups = adapter_of(session).groups()
            assert any(has(t) for group in groups for t in group.tensors.values()), (
                f"training({variant!r}) has no such tensor"
            )
            check_groups(session)

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
            spoil(adapter, {group.name: np.ones(row_count(group), bool) for group in adapter.groups()})
            session.recover("all")
            then, now, newest = recorder.seen[2], Seen.of(training, self.generators), recorder.seen[4]
            other = differing(then.values, now.values)
            assert not other, f"values that are not as they were saved: {other}"
            assert now.extras == newest.extras, f"extras were changed: {differing(newest.extras, now.extras)}"
            raise Stop

        recorder = Recorder(training, self.generators, {2: checkpoint, 4: recover})
        with stopped():
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
                raise unittest.SkipTest("the loop itself ends iterations")
            remove.append(
                adapter_of(session).install(
                    lambda: called("before", session), lambda: called("after", session)
                )
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
        assert ends[-1] == len(names) - 1, "removed hooks are called"
        for step, (first, last) in enumerate(itertools.pairwise(ends), start=1):
            between = names[first + 1 : last]
            assert between[:1] == ["before"], f"iteration {step} has called {between}: `before` comes first"
            assert between[-1] == "after", f"iteration {step} has called {between}: `after` comes last"
            assert between.count("after") == 1, f"iteration {step} has called {between}: `after` comes once"
            changed = differing(calls[first][1], calls[first + 1][1])
            assert not changed, f"`before` of iteration {step} comes when these have been changed: {changed}"
            changed = differing(calls[last][1], calls[last - 1][1])
            assert not changed, f"`after` of iteration {step} comes before these are changed: {changed}"

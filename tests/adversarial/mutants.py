"""Break the product on purpose, one claim of docs/guarantees.md at a time: the tests named there have to notice.

    python -m tests.adversarial.mutants [--list] [WORD ...]

Runs the mutants of claims that contain one of the words, or all, each in a copy of this tree. Exit code 1 if a test
passes although the line that it is about is broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs/guarantees.md"
_SECONDS = 900
"""Seconds after which a test counts as failed: a broken product may wait forever."""


@dataclass(frozen=True)
class Mutant:
    """A claim, and a change of the code that breaks it."""

    test: str
    """A test named in the claim's line of docs/guarantees.md, without its file."""
    file: str
    old: str
    """Text that occurs once in the file."""
    new: str


MUTANTS = (
    Mutant(
        "test_what_was_contradicted_is_set_aside_and_said",
        "scarctl/arena/line.py",
        "return _belongs(noted, line)",
        "return True",
    ),
    Mutant(
        "test_the_stores_copy_is_taken_instead",
        "scarctl/recovery/memory.py",
        "    return ids[wrong]",
        "    return ids[:0]",
    ),
    Mutant(
        "test_one_name_means_one_moment",
        "scarctl/state/identity.py",
        "            name = name if again and self._given[name] == digest else uuid.uuid4().hex",
        "            pass",
    ),
    Mutant(
        "test_file_systems_of_fsspec_that_look_first",
        "scarctl/store/backends/exclusive.py",
        'if owner.__module__.startswith("fsspec."):',
        "if True:\n        return None\n    if not owner:",
    ),
    Mutant(
        "test_one_too_many_saves_from_a_thread",
        "scarctl/daemon/crowd.py",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))",
        "pass",
    ),
    Mutant(
        "test_one_that_others_may_write_is_ignored",
        "scarctl/util/trust.py",
        "    if who := _writers(opened):",
        "    if who := None:",
    ),
    Mutant(
        "test_only_what_was_drawn_inside_is_put_back",
        "scarctl/checkpoint/randomness.py",
        "            torch.set_rng_state(before.torch)",
        "            pass",
    ),
    Mutant(
        "test_sigterm_after_a_block_that_raised_leaves_the_state_before_it",
        "scarctl/session/gate.py",
        "self._torn = self._stepping and not self._implied",
        "self._torn = False",
    ),
    Mutant(
        "test_a_step_beside_the_hooks_is_refused_at_once",
        "scarctl/session/session.py",
        "        if self._hooked:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
    ),
    Mutant(
        "test_a_lost_parameter_comes_back_with_all_its_optimizer_has",
        "scarctl/session/completing.py",
        "            restore(lost_rows(engine.layout, ids), found.newest)",
        "            pass",
    ),
    Mutant(
        "test_the_same_cell_again_continues_after_its_newest_step",
        "scarctl/session/attached.py",
        "        earlier._close(Ending.FAILED)",
        "        pass",
    ),
    Mutant(
        "test_the_arguments_of_resume_are_checked_on_an_empty_store",
        "scarctl/session/session.py",
        "        check_mode(mode)\n",
        "",
    ),
    Mutant(
        "test_the_reason_and_what_to_do",
        "scarctl/checkpoint/behind.py",
        "        if self._fixed is None:",
        "        if self._fixed == 10:",
    ),
    Mutant(
        "test_a_store_that_was_copied_away_says_that_the_run_may_be_further",
        "scarctl/ops/ages.py",
        "not alive or not all(alive)",
        "False",
    ),
    Mutant(
        "test_one_line_each_at_attach_resume_and_close",
        "scarctl/session/resumed.py",
        '        log.log(level, "resumed %s at %s", store.url, resumed)',
        "        pass",
    ),
    Mutant(
        "test_a_commit_needs_each_of_its_fsyncs",
        "scarctl/store/backends/local_files.py",
        "        if entry:\n            sync_folder(os.path.dirname(self._path))",
        "",
    ),
    Mutant(
        "test_what_a_loop_writes_meanwhile_does_not_count_as_the_stores_copy",
        "scarctl/checkpoint/filling.py",
        "right[part] = checksums(slot, g, ids) == wanted[ids]",
        "right[part] = True",
    ),
    Mutant(
        "test_damage_is_found_and_never_returned",
        "scarctl/store/read.py",
        "        intact = sums == checksums[i:j]",
        "        intact = np.ones(j - i, dtype=bool)",
    ),
    Mutant(
        "test_before_the_newest",
        "scarctl/store/shard_state.py",
        "        self.damaged.append(damage)\n        self.doubt[:] = True",
        "        self.damaged.append(damage)",
    ),
    Mutant(
        "test_a_resume_from_encoded_copies_is_not_exact_though_all_are_of_one_step",
        "scarctl/store/shard_state.py",
        '        if all(s.encoding == "exact" for s in self.segments):',
        "        if True:",
    ),
    Mutant(
        "test_what_only_the_memory_has_exactly_is_not_safe",
        "scarctl/persist/evacuation.py",
        "        unsaved = waiting | (lacking >= 0)  # an encoded copy is not the copy in memory",
        "        unsaved = waiting",
    ),
    Mutant(
        "test_a_signal_without_a_copy_is_said",
        "scarctl/session/ending.py",
        "        self._report_unsaved(engine, failed=moment is None or self._saving.stats.errors > errors)\n"
        "        return False",
        "        return False",
    ),
    Mutant(
        "test_what_was_never_complete_is_forgotten_at_the_next_start",
        "scarctl/arena/slots.py",
        "                spare.moments[late] = 0",
        "                spare.moments[late[:0]] = 0",
    ),
    Mutant(
        "test_memory_has_one_step_after_each_kill",
        "scarctl/checkpoint/engine.py",
        "        bad = live.save(copied.ids, slot, version, moment, self.tracker.unread)",
        "        arena.flip(slot, moment, version, arena.whole)\n"
        "        bad = live.save(copied.ids, slot, version, moment, self.tracker.unread)",
    ),
    Mutant(
        "test_a_flush_ends_the_hold_and_the_newest_state_is_saved",
        "scarctl/arena/slots.py",
        "        return self._there and self._holds.number == self.number",
        "        return self._there",
    ),
    Mutant(
        "test_a_writer_that_is_overtaken_after_its_record_is_fenced",
        "scarctl/store/claim.py",
        "    if own and not blobs.has(term_path(term.shard, term.number + 1)) and all(blobs.each(blobs.has, names)):",
        "    if own and all(blobs.each(blobs.has, names)):",
    ),
)


def claim_of(mutant: Mutant) -> tuple[str, list[str]]:
    """Return the mutant's claim, and the ids of all tests that its line names. Raises ValueError without one line."""
    lines = GUARANTEES.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if f"::{mutant.test}`" in line]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of {GUARANTEES.name} name {mutant.test}")
    return found[0].split("|")[1].strip(), re.findall(r"`(tests/[^`]+::[^`]+)`", found[0])


def applied(mutant: Mutant, text: str) -> str:
    """Return the changed text of the mutant's file. Raises ValueError unless `old` occurs once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def passes(tree: Path, tests: list[str]) -> bool:
    """Return whether these tests pass in `tree`, a copy of this one. Raises RuntimeError if they cannot run."""
    places = os.pathsep.join(map(str, (tree, tree / "adapters")))
    environ = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environ, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def survives(tree: Path, mutant: Mutant) -> bool:
    """Return whether the tests of the mutant's claim pass, although the mutant breaks what they check."""
    path = tree / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(applied(mutant, before), encoding="utf-8")
    try:
        return passes(tree, claim_of(mutant)[1])
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    """Run the named mutants, or all; print one line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the claims, and run nothing")
    parser.add_argument(
        "word", nargs="*", help="run mutants of claims that contain one of these; default: all"
    )
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.word or any(word in claim_of(m)[0] for word in given.word)]
    if given.list:
        print("\n".join(claim_of(mutant)[0] for mutant in chosen))  # noqa: T201
        return 0
    alive = 0
    with tempfile.TemporaryDirectory(prefix="scarctl-") as folder:
        tree = Path(folder)
        for name in ("scarctl", "adapters", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        if not passes(tree, sorted({test for mutant in chosen for test in claim_of(mutant)[1]})):
            print("the tests do not pass as the code is")  # noqa: T201
            return 1
        for mutant in chosen:
            left = survives(tree, mutant)
            alive += left
            print(f"{'NOT NOTICED' if left else 'noticed':12} {claim_of(mutant)[0]}", flush=True)  # noqa: T201
    print(f"{len(chosen)} mutants, {alive} not noticed")  # noqa: T201
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Test names of whole commits: ranks in lockstep agree, and different moments of one step have different names."""

from __future__ import annotations

import functools
import itertools

import pytest

from scarctl.state.identity import Identities


class Start:
    """One start of a job, of several ranks or one process, which writes nothing between steps."""

    start = "0" * 32

    def __init__(self, several: bool) -> None:
        self.several = several

    def writes(self) -> int:
        return 0


def named(extras: list[bytes], several: bool = True) -> list[str]:
    """Return the names of commits of step 10, all with the same copies, and with these extras."""
    identities, names = Identities(Start(several)), [""]
    for digest in extras:
        names.append(identities.of(10, names[-1], changed=False, extras=functools.partial(bytes, digest)))
        identities.made()
    return names[1:]


def test_ranks_in_lockstep_agree() -> None:
    """Each rank has extras of its own."""
    assert named([b"a", b"b", b"c"]) == named([b"d", b"e", b"f"])
    assert named([b"a", b"a"]) == named([b"d", b"d"]), "nothing changed on either"


def test_a_repeated_commit_keeps_its_name() -> None:
    one, again, other = named([b"a", b"a", b"b"])
    assert one == again != other


def test_one_name_means_one_moment() -> None:
    """The extras of the ranks change at different moments."""
    histories = [[x, y, z] for x in (b"x",) for y in (b"x", b"y") for z in (b"x", b"y", b"z")]
    for one, other in itertools.product(histories, repeat=2):
        for i, j in itertools.product(range(3), repeat=2):
            if named(one)[i] == named(other)[j]:
                assert one[i] == one[j] or other[i] == other[j], (one, other, i, j)


def begun(several: bool) -> tuple[Identities, str]:
    """Return names of a job, and that of a commit of step 10 which has been named and not made."""
    identities = Identities(Start(several))
    return identities, identities.of(10, "", changed=True, extras=lambda: b"a")


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_a_commit_that_failed_and_is_repeated_is_one_commit(several: bool, reached: bool) -> None:
    """It has the name that it has on ranks where it did not fail. reached: the arena has got the name."""
    expected, later = named([b"a", b"b"], several)
    identities, name = begun(several)
    there = name if reached else ""
    identities.failed(there)
    assert identities.of(10, there, changed=False, extras=lambda: b"a") == expected
    identities.made()
    assert identities.of(10, expected, changed=False, extras=lambda: b"b") == later


@pytest.mark.parametrize("several", [True, False])
def test_the_name_of_a_commit_that_failed_is_of_no_other_state(several: bool) -> None:
    """The queue may have it, with the copies and extras of that moment."""
    for there, changed, digest in (("", True, b"a"), ("its own", True, b"a"), ("its own", False, b"b")):
        identities, name = begun(several)
        identities.failed(name)
        if several or changed:  # a process alone saves its copies and extras in one record
            other = identities.of(
                10, there and name, changed=changed, extras=functools.partial(bytes, digest)
            )
            assert other != name


def test_the_name_of_a_commit_that_failed_is_of_no_other_moment() -> None:
    """The other ranks have saved the moment in which it failed here, and this rank's extras have changed since."""
    identities, name = begun(several=True)
    identities.failed("")
    assert identities.of(10, "", changed=True, extras=lambda: b"b") != name
    identities.failed("")
    assert identities.of(10, "", changed=True, extras=lambda: b"a") == name, "they have changed back"
    identities.made()
    assert identities.of(10, "its own", changed=True, extras=lambda: b"a") != name


def test_a_failure_before_the_name_changes_nothing() -> None:
    identities, name = begun(several=True)
    identities.made()
    identities.failed(name)
    assert identities.of(10, name, changed=False, extras=lambda: b"a") == name

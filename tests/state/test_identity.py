"""Test names of whole commits: ranks in lockstep agree, and different moments of one step have different names."""

from __future__ import annotations

import functools
import itertools

from scarctl.state.identity import Identities


class Start:
    """One start of a job of several ranks, none of which writes between steps."""

    start = "0" * 32
    several = True

    def writes(self) -> int:
        return 0


def named(extras: list[bytes]) -> list[str]:
    """Return the names of commits of step 10, all with the same copies, and with these extras."""
    identities, names = Identities(Start()), [""]
    for digest in extras:
        names.append(identities.of(10, names[-1], changed=False, extras=functools.partial(bytes, digest)))
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

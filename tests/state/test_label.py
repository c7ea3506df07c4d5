"""Test the words of a label."""

from __future__ import annotations

import pytest

from scarctl.state.label import Label


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label(True, 5, 5, True), "consistent"),
        (Label(True, 5, 5), "consistent; the position in the data is unknown"),
        (Label(False, 3, 5, True, ("partitions are of several steps",)), "mixed, partitions of steps 3 to 5"),
        (Label(False, 5, 5, True, ("ranks differ",)), "mixed: ranks differ"),
    ],
)
def test_a_label_says_what_is_known(label: Label, text: str) -> None:
    assert str(label) == text
    assert label.to_json() == {
        "consistent": label.consistent,
        "first_step": label.first,
        "last_step": label.last,
        "position": "declared" if label.declared else "unknown",
    }

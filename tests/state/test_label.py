"""Test the words of a label, and how labels of parts are put together."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.state.label import PART, SEVERAL, Label
from scarctl.state.version import NEVER, pack


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label(5, 5, declared=True), "step 5, consistent"),
        (Label(5, 5, declared=False), "step 5, consistent; the position in the data is unknown"),
        (Label(5, 5), "step 5, consistent"),
        (Label(3, 5, (SEVERAL,), declared=True), "mixed, partitions of steps 3 to 5"),
        (Label(3, 5, (PART,), ("ranks differ",)), "mixed, partitions of steps 3 to 5: ranks differ"),
        (Label(5, 5, (PART,), ("ranks\ndiffer",)), f"step 5, mixed: {PART}; ranks\\ndiffer"),
        (Label(mixed=("nothing is known",)), "mixed: nothing is known"),
    ],
)
def test_a_label_says_what_is_known(label: Label, text: str) -> None:
    assert str(label) == text
    known = None if label.declared is None else "declared" if label.declared else "unknown"
    assert label.to_json() == {
        "oldest_step": label.oldest_step,
        "newest_step": label.newest_step,
        "consistent": not label.reasons,
        "reasons": [*label.mixed, *label.caveats],
        "position": known,
    }
    assert Label.from_json(label.to_json()).to_json() == label.to_json()


def test_the_steps_are_those_of_the_copies() -> None:
    versions = np.array([pack(2, 4), pack(1, 9), NEVER])
    assert Label.of(versions, SEVERAL) == Label(4, 9, (SEVERAL,))
    assert Label.of(versions[2:]) == Label()
    assert Label.of(versions[:1]).step == 4


def test_a_whole_has_the_steps_of_its_parts_and_no_position_that_one_of_them_lacks() -> None:
    parts = [Label(4, 6, (SEVERAL,), ("a",), True), Label(5, 9, (PART,), ("b", "a"), False), Label()]
    assert Label.over(parts) == Label(4, 9, (SEVERAL, PART), ("a", "b"), False)
    assert Label.over([Label(7, 7)]) == Label(7, 7)
    assert Label.over([]) == Label()

"""Test which partitions are marked as lost, and in which words."""

from __future__ import annotations

import threading

import numpy as np

from scarctl.checkpoint.marked import Marked
from scarctl.state.layout import TensorSpec, build_layout

LAYOUT = build_layout([("w", "parameter", (TensorSpec("", "F32", (8, 2)),))], rows={"w": 1})


def test_marks_add_up_until_they_are_removed() -> None:
    marked = Marked(LAYOUT)
    assert marked.told == ""
    marked.add(np.array([2, 3]))
    before = marked.mask
    marked.add(np.array([3, 5]))
    assert before.tolist() == [False, False, True, True, False, False, False, False], "a mask never changes"
    assert marked.ids.tolist() == [2, 3, 5]
    assert marked.told == "3 partitions, such as w[2:3], are marked as lost"
    marked.remove(np.array([2, 3]))
    assert marked.told == "1 partition, w[5:6], is marked as lost"
    marked.remove(np.arange(8))
    assert not marked.ids.size


def test_threads_lose_no_mark() -> None:
    marked = Marked(LAYOUT)
    threads = [threading.Thread(target=marked.add, args=(np.array([k]),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert marked.ids.size == 8

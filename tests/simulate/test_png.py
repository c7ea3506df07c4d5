"""Test pictures as PNG with resvg, and the message without it."""

from __future__ import annotations

import struct
import sys
from functools import partial

import pytest

from scarctl.errors import UsageError
from scarctl.simulate import png
from scarctl.simulate.chart import draw
from scarctl.simulate.study import Study
from scarctl.simulate.summary import summarise

STUDY = Study(workload="some:where", modes=("rollback",))
RESULT = {"trial": 0, "rework": [3], "perturbation": [1.0], "arrived": [True], "undisturbed": 9, "same": True}


@pytest.fixture
def drawn() -> bytes:
    pytest.importorskip("resvg_py", reason="resvg_py is not installed: see the extra [png]")
    try:
        return png.render(draw(STUDY, summarise(STUDY, [RESULT])))
    except UsageError as error:
        pytest.skip(error.message)


def test_a_picture_of_its_size(drawn: bytes) -> None:
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">2I", drawn[16:24]) == (2 * 360, 2 * (260 + 46))


def test_without_a_font_the_words_would_silently_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg = pytest.importorskip("resvg_py", reason="resvg_py is not installed: see the extra [png]")
    monkeypatch.setattr(resvg, "svg_to_bytes", partial(resvg.svg_to_bytes, skip_system_fonts=True))
    with pytest.raises(UsageError, match="fonts") as caught:
        png.check()
    assert ".svg" in str(caught.value.hint)


def test_without_resvg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        png.check()
    assert "scarctl[png]" in str(caught.value.hint)

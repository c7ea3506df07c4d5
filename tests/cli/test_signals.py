"""Test that a signal ends a command wherever it arrives."""

from __future__ import annotations

import os
import signal
import time
import weakref

import pytest

from scarctl.cli.output import Terminated, signals


class Noted:
    """An object that can be referred to weakly."""


def meets_a_signal() -> None:
    """Get SIGTERM in a callback of a weak reference, like those at the end of an import, and go on."""
    noted = Noted()

    def arrives(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    reference = weakref.ref(noted, arrives)
    del noted
    assert reference() is None
    time.sleep(10)


def test_a_signal_ends_a_command_even_where_python_drops_its_exception() -> None:
    with pytest.raises(Terminated) as ended, signals():
        meets_a_signal()
    assert ended.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

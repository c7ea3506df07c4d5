"""Run a module as a rank forked from torchrun's agent, with the signal handlers of a new process.

Its arguments are those of `python -m`; `tests.distributed.launch` gives it to torchrun as --run-path.
"""

from __future__ import annotations

import runpy
import signal
import sys

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

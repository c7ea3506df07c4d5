"""Run trials in a process of their own: `python -m scarctl.simulate.worker`, one line of JSON in and one out.

The process ends when its input does, so it never outlives its parent process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from scarctl.errors import ScarError, UsageError
from scarctl.simulate.study import Study


def main() -> None:
    """Read the study, then numbers of trials; answer each with its result or an error."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole process group; the parent process ends this one
    # A workload's output must not mix with the results.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    try:
        workload, trial = None, -1
        study = Study.from_json(json.loads(lines.get()))
        while True:
            answer: dict[str, Any]
            try:
                if workload is None:
                    from scarctl.simulate.trial import run_trial
                    from scarctl.simulate.workload import load, source_digest

                    workload = load(study.workload, study.data)
                    answer = {"source": source_digest(study.workload)}
                else:
                    answer = {"result": run_trial(study, workload, trial)}
            except ScarError as error:
                usage = isinstance(error, UsageError)
                fields = {"kind": error.kind, "message": error.message, "hint": error.hint, "usage": usage}
                answer = {"error": fields}
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                answer = {
                    "error": {
                        "kind": "workload-failed",
                        "message": f"trial {trial} failed: {type(error).__name__}: {error}",
                        "usage": False,
                        "hint": f"raised in {place.name}, {place.filename}:{place.lineno}",
                    }
                }
            out.write(json.dumps(answer) + "\n")
            out.flush()
            trial = int(lines.get())
    except BrokenPipeError:
        os._exit(0)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # also within a trial: the parent process has ended


if __name__ == "__main__":
    main()

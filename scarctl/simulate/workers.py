"""Run trials in several processes. A result depends on its trial's number alone, not on the process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from scarctl.errors import ScarError, UsageError, by_kind
from scarctl.simulate.study import Study

# One thread sums in one order on every machine. The processes already use the cores.
_ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)


class Workers:
    """Processes that run a study's trials. Leaving the `with` statement ends them."""

    def __init__(self, study: Study, jobs: int) -> None:
        """Start `jobs` processes. Raises UsageError when the first cannot load the workload."""
        self._study = study
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for _ in range(jobs):
                self._processes.append(self._start())
            self.source = str(self._answer(self._processes[0])["source"])
            """Digest of the workload's program."""
        except BaseException:
            self.__exit__()
            raise
        self._ready = {id(self._processes[0])}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # a worker holds no results: finished ones are already written
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def run(self, trials: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield results as they come. Raises the first error of any trial."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for trial in trials:
            waiting.put(trial)
        count = waiting.qsize()
        done: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        for process in self._processes[:count]:
            threading.Thread(target=self._feed, args=(process, waiting, done), daemon=True).start()
        for _ in range(count):
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found

    def _feed(
        self,
        process: subprocess.Popen[str],
        waiting: queue.SimpleQueue[int],
        done: queue.SimpleQueue[dict[str, Any] | BaseException],
    ) -> None:
        try:
            if id(process) not in self._ready:
                self._answer(process)
                self._ready.add(id(process))
            while True:
                trial = waiting.get_nowait()
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the process has died: the read below raises
                    process.stdin.write(f"{trial}\n")
                    process.stdin.flush()
                done.put(self._answer(process)["result"])
        except queue.Empty:
            return
        except BaseException as error:  # raised by `run`
            done.put(error)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "scarctl.simulate.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, **_ONE_THREAD},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._study.to_json()) + "\n")
        process.stdin.flush()
        return process

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("\n"):
            code = process.wait()
            what = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise ScarError(
                f"a process that ran trials ended {what}",
                hint="if memory ran out, use --jobs 1",
                kind="worker-died",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            kind = UsageError if error["usage"] else by_kind(error["kind"])
            raise kind(error["message"], hint=error["hint"], kind=error["kind"])
        return answer

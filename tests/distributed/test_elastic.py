"""Test `torchrun --nnodes 1:2`: an agent dies with its rank, the other continues without it, and a new agent joins."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launch import RANKS_ARE_FORKS, free_port, of_agent
from tests.support.forkserver import Program


class Agents:
    """torchrun's agents, each with one rank, as if on different hosts. The first is their rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port, self._running = free_port(), list[Program]()
        self._starts = 0
        """How often the job had begun at the last wait."""

    def start(self) -> Program:
        first = int(not self._running)
        meeting = f"is_host={first},last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=15"
        options = [{"until": str(self.folder / "enough"), "settings": {"daemon": None}}]
        command = [
            *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "job"),
            *("--rdzv-conf", meeting, "--max-restarts", "9", *RANKS_ARE_FORKS),
            *("tests.distributed.job", "fsdp", str(self.folder), str(1 << 20), json.dumps(options)),
        ]
        with (self.folder / f"agent-{len(self._running)}.log").open("wb") as log:
            agent = Program(command, env=of_agent(), stdout=log, stderr=log)
        self._running.append(agent)
        return agent

    def kill(self, agent: Program) -> None:
        """Kill the agent and its rank at once."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in [agent.pid, *map(int, children)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def started(self, world: int, seconds: float = 150.0) -> None:
        """Wait until the job has begun again with so many ranks, and all of them have saved since.

        On a busy machine agents lose contact, and the job begins more often.
        """
        store, deadline = self.folder / "store", time.monotonic() + seconds
        while time.monotonic() < deadline:
            topologies = sorted((store / "topology").glob("*")) if store.exists() else []
            if len(topologies) > self._starts:
                shards = json.loads(topologies[-1].read_text())["shards"]
                saved = (len(list((store / "shards" / str(s) / "seg").glob("*"))) for s in shards)
                if len(shards) == world and all(count > 3 for count in saved):
                    self._starts = len(topologies)
                    return
            time.sleep(0.1)
        raise AssertionError("\n".join(log.read_text()[-3000:] for log in self.folder.glob("agent-*.log")))

    def end(self) -> None:
        """Ask all to end, and wait for their end."""
        (self.folder / "enough").touch()
        for agent in self._running:
            if agent.returncode is None:
                assert agent.wait(150) == 0

    def stop(self) -> None:
        for agent in self._running:
            if agent.poll() is None:
                agent.terminate()
                agent.wait()


@contextmanager
def agents(folder: Path) -> Iterator[Agents]:
    found = Agents(folder)
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_agents_come_and_go(tmp_path: Path) -> None:
    with agents(tmp_path) as elastic:
        _, second = elastic.start(), elastic.start()
        elastic.started(world=2)
        elastic.kill(second)
        elastic.started(world=1)
        elastic.start()
        elastic.started(world=2)
        elastic.end()
    # On a busy machine the job may have begun again at its very end.
    lines = [(tmp_path / f"report-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    reports = [json.loads(of_rank[-1]) for of_rank in lines]
    assert len({report["step"] for report in reports}) == 1
    assert all(report["step"] > 0 and report["errors"] == 0 for report in reports)
    assert [report["ranks"]["lost"] for report in reports] == [[], []], "it made room for the other one"

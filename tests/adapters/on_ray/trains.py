"""Run Ray Train on two nodes, where a rank is killed and a node is taken away. It prints its findings as JSON.

    python -m tests.adapters.on_ray.trains FOLDER

Run in a network of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from scarctl_adapters.ray import Preemption, attach_and_resume

STEPS, KILLED_AT = 60, 8


def train(config: dict[str, Any]) -> None:
    """Train until a node has been taken away, or for STEPS steps."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    told = folder / f"told-{rank}.jsonl"
    torch.manual_seed(3)
    model = prepare_model(torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = attach_and_resume(model, optimizer, root=str(folder / "runs"), interval=2, fraction=1.0)
    preemption = Preemption(session)

    def tell(**what: Any) -> None:
        with told.open("a") as file:
            file.write(json.dumps(what) + "\n")

    resumed = session.resumed
    tell(
        resumed=resumed.step,
        consistent=resumed.consistent,
        sum=float(sum(p.detach().sum() for p in model.parameters())),
    )
    killed = folder / "killed"
    with session:
        while session.head_step < STEPS:
            model(torch.full((8, 16), float(rank))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.2)
            if rank == 1 and session.head_step == KILLED_AT and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if session.head_step == KILLED_AT + 4 and rank == 0:
                (folder / "take").touch()
            safe = preemption()
            if safe is not None:
                tell(evacuated=safe.step, sealed=safe.sealed, lost=safe.lost_partitions)
                break
        tell(end=session.head_step)


def main(folder: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20})
    second = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(name="run-7", storage_path=f"{folder}/results",
                             failure_config=FailureConfig(max_failures=2)),
    )  # fmt: skip
    watching = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.adapters.on_ray.trains",
            "take",
            folder,
            cluster.address,
            second.node_id,
        ]
    )
    try:
        trainer.fit()
    finally:
        watching.kill()
        watching.wait()
    lines = {rank: (Path(folder) / f"told-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)}
    found = {rank: [json.loads(line) for line in told] for rank, told in lines.items()}
    # In this order: if the cluster ended first, the driver would end with an error.
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")


def take(folder: str, address: str, node: str) -> None:
    """Announce to Ray, once FOLDER/take exists, that a node shuts down in 30 s, as a cloud's agent does."""
    while not Path(folder, "take").exists():
        time.sleep(0.1)
    subprocess.run(
        ["ray", "drain-node", "--address", address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
         "--reason-message", "taken", "--deadline-remaining-seconds", "30"],
        check=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "take":
        take(*sys.argv[2:])
    else:
        main(*sys.argv[1:])

"""Compare elastic schedules with DistributedDataParallel: a step on a slow link, and the accuracy.

    python benchmarks/elastic.py --rounds 5
    python benchmarks/elastic.py --seeds 5 --accuracy

Two ranks of gloo, in a network namespace whose loopback is shaped (`unshare`, `tc`). The computation of the step is a
pause, so that a busy machine does not count: a third of it forward, two thirds backward, together as long as all
gradients take over the link. The most to be gained is then 1.33: DDP overlaps the backward pass only. The accuracy is
that of a real network on scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from ranked import here
from timing import interleaved, print_table, spread
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from examples.elastic import Elastic, schedule

LAYERS, WIDTH = 8, 512
BETAS = (1.0, 0.9, 0.8, 0.5)


class Pause(torch.autograd.Function):
    """Takes `ahead` seconds forward and `back` seconds backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ahead: float, back: float) -> torch.Tensor:
        ctx.back = back
        time.sleep(ahead)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.back)
        return grads[0], None, None


class Slow(nn.Module):
    """Layers whose computation takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.ahead, self.back = seconds / 3 / LAYERS, seconds * 2 / 3 / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x), self.ahead, self.back)
        return x


def exchange() -> float:
    """Return the seconds in which all gradients are reduced, layer by layer, with nothing else."""
    parts = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
    taken = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        taken.append(time.perf_counter() - start)
    found = torch.tensor(statistics.median(taken[1:]))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def speed(args: argparse.Namespace, rank: int) -> None:
    """Print the seconds per step of every case, in turns."""
    seconds = exchange()
    made: dict[str, Any] = {}

    def case(beta: float | None) -> Any:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Slow(seconds), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        made[str(beta)] = None if beta is None else schedule(ddp, optimizer, beta=beta)
        x = torch.randn(4, WIDTH)

        def run() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
            taken = (time.perf_counter() - start) / args.steps
            if isinstance(made[str(beta)], Elastic):
                made[str(beta)].settle()
            return taken

        run()  # buckets are made anew
        return run

    cases = {"DDP": case(None), **{f"beta {beta}": case(beta) for beta in BETAS}}
    found = interleaved(cases, args.rounds)
    if rank:
        return
    print(f"all gradients take {seconds * 1e3:.0f} ms over the link, and the computation as long")
    rows = []
    for name, values in found.items():
        elastic = made[name.removeprefix("beta ")] if name != "DDP" else None
        rates = [base / value for base, value in zip(found["DDP"], values, strict=True)]
        lent = "" if elastic is None else f"{elastic.lent_steps / elastic.steps:.0%}"
        rows.append([name, spread(values, 1e-3, 0), f"{statistics.median(rates):.2f}", lent])
    print_table(["", "step, ms", "speed-up", "steps that lent"], rows)


def accuracy(args: argparse.Namespace, rank: int) -> None:
    """Test accuracy after training on digits, by beta, over seeds."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    rows = []
    for beta in BETAS:
        scores, lent = [], 0.0
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            order = torch.randperm(len(x))
            train, test = order[:1400], order[1400:]
            sizes = [(64, 512), (512, 512), (512, 10)]
            model = nn.Sequential(*(m for a, b in sizes for m in (nn.Linear(a, b), nn.ReLU())))[:-1]
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=args.momentum)
            elastic = schedule(ddp, optimizer, beta=beta)
            for epoch in range(args.epochs):
                own = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))][
                    rank::2
                ]
                for batch in own.split(32)[: len(train) // 64]:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(ddp(x[batch]), y[batch]).backward()
                    optimizer.step()
            elastic.settle()
            lent += elastic.lent_steps / elastic.steps / args.seeds
            with torch.no_grad():
                scores.append(float((model(x[test]).argmax(1) == y[test]).float().mean()))
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
        rows.append([f"{beta}", f"{statistics.mean(scores):.4f} ± {error:.4f}", f"{lent:.0%}"])
    if rank == 0:
        print_table(["beta", "test accuracy (mean, standard error)", "steps that lent"], rows)


def rank_main(rank: int, args: argparse.Namespace) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    (accuracy if args.accuracy else speed)(args, rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=10, help="of one round")
    options.add_argument("--rate", default="400mbit", help="of the link")
    options.add_argument("--accuracy", action="store_true", help="measure accuracy instead of speed")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--momentum", type=float, default=0.0)
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if not args.inside:
        shape = f"tc qdisc add dev lo root tbf rate {args.rate} burst 64kb latency 500ms"
        script = f'ip link set lo mtu 1500 up && {shape} && exec "$@"'
        command = ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, here(__file__), "--inside"]
        sys.exit(subprocess.run([*command, *sys.argv[1:]], check=False).returncode)
    spawn(rank_main, (args,), nprocs=2)


if __name__ == "__main__":
    main()

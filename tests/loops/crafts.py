"""Provide programs of several crafts: functional gradients, parametrizations, replay, averages in other dtypes."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler, Subset

import scarctl
from tests.loops.habits import shuffled
from tests.loops.rig import EPOCHS, STEPS, Digits, Run, net, train


def functional_gradients(run: Run) -> None:
    """Compute gradients of each sample with torch.func, under dropout, and hand their mean to the optimizer."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    each = torch.func.vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            found = each(dict(model.named_parameters()), x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = found[name].mean(0).detach()
            optimizer.step()
            run.iterated()


def reentrant(run: Run) -> None:
    """Activation checkpointing of the older kind, under dropout and augmentation by hand."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            optimizer.zero_grad()
            noisy = (x + 0.1 * torch.randn_like(x)).requires_grad_()
            functional.cross_entropy(checkpoint(model, noisy, use_reentrant=True), y).backward()
            optimizer.step()
            run.iterated()


def parametrized(run: Run, *, later: bool) -> None:
    """Weight and spectral norm as parametrizations. later: registered as the second epoch begins."""
    model: Any = net()

    def register() -> None:
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[3])

    if not later:
        register()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if later and epoch == 1:
            register()
            known = {id(p) for group in optimizer.param_groups for p in group["params"]}
            optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known]})
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def pruned(run: Run, *, later: bool) -> None:
    """Prune a layer more as each epoch begins. later: the mask does not exist before the second epoch."""
    model: Any = net()
    if not later:
        prune.identity(model[0], "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch:
            prune.l1_unstructured(model[0], "weight", amount=10)
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def sharpness(run: Run) -> None:
    """Sharpness-aware minimization by hand: weights are disturbed between two backward passes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            disturbed = [(p, 0.05 * p.grad) for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for parameter, by in disturbed:
                    parameter.add_(by)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter, by in disturbed:
                    parameter.sub_(by)
            optimizer.step()
            run.iterated()


class Words(nn.Module):
    """A sparse table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.out = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids))  # type: ignore[no-any-return]


def sparse(run: Run) -> None:
    """Train a sparse table with SparseAdam, and the rest with Adam; rows are drawn for each batch."""
    model = Words()
    optimizers: list[Any] = [
        torch.optim.SparseAdam(model.table.parameters(), lr=0.01),
        torch.optim.Adam(model.out.parameters()),
    ]
    session = run.attach(model, optimizers)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for _, y in session.batches(shuffled()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            functional.cross_entropy(model(torch.randint(0, 50, (len(y), 5))), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            run.iterated()


def masters(run: Run) -> None:
    """Train masters in float32 by hand, and copy them into a model in float16 after each step."""
    model = net().half()
    held = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.Adam(held, lr=0.01)
    session = run.attach(nn.ModuleDict({"model": model, "masters": nn.ParameterList(held)}), optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            model.zero_grad()
            functional.cross_entropy(model(x.half()).float(), y).backward()
            for master, parameter in zip(held, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            optimizer.step()
            for master, parameter in zip(held, model.parameters(), strict=True):
                parameter.data.copy_(master)
            run.iterated()


class Replay:
    """The newest transitions of a world. Its state is of tensors alone."""

    def __init__(self) -> None:
        self.items: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=12)

    def state_dict(self) -> dict[str, Any]:
        return {"items": [list(item) for item in self.items]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = deque([(x, y) for x, y in state["items"]], maxlen=12)


def replay(run: Run, *, saved: bool, ours: bool = True) -> None:
    """Q-learning with a replay buffer and a target network. saved: both are in extras."""
    model = net()
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    buffer = Replay()
    random.seed(0)
    session = run.attach(model, optimizer, extras={"target": target, "replay": buffer} if saved else {})
    run.resume()

    def one() -> None:
        buffer.items.append((torch.rand(4, 8), torch.rand(4)))
        x, reward = random.choice(buffer.items)
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = reward + 0.9 * target(x).amax(-1)
        (model(x).amax(-1) - wanted).square().mean().backward()
        optimizer.step()
        if session.head_step % 4 == 0:
            target.load_state_dict(model.state_dict())
        run.iterated()

    if ours:
        for _ in session.batches(range(STEPS)):
            one()
    while session.head_step < STEPS:
        one()


class Contrast(nn.Module):
    """MoCo: a second encoder that follows the first, and a queue of its keys in a buffer."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = net()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, 2), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data.mul_(0.9).add_(0.1 * theirs.data)
            key = functional.normalize(self.key(other), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        at = int(self.place)
        self.queue[at : at + len(key)] = key
        self.place[0] = (at + len(key)) % len(self.queue)
        return functional.cross_entropy(logits, torch.zeros(len(key), dtype=torch.long))


def contrast(run: Run) -> None:
    """Learn representations against a queue of earlier keys."""
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, _ in session.batches(shuffled()):
            optimizer.zero_grad()
            model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)).backward()
            optimizer.step()
            run.iterated()


def double_average(run: Run) -> None:
    """Keep an average of the model in float64, made by a deep copy."""
    model = net()
    average = copy.deepcopy(model).double().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer, extras={"average": average})
    run._models.append(average)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs.double(), 0.1)
            run.iterated()


def finder(run: Run) -> None:
    """Try learning rates in three steps as the second epoch begins, and put model and optimizer back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 1:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for number, batch in enumerate(shuffled()):
                optimizer.param_groups[0]["lr"] = 0.01 * 2**number
                train(model, optimizer, batch)
                if number == 2:
                    break
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            optimizer.param_groups[0]["lr"] = 0.05
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def folds(run: Run) -> None:
    """Train on two folds of the data, one after another, each with a new model and a store of its own."""
    data = Digits()
    for fold in range(2):
        torch.manual_seed(fold)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters())
        chosen = Subset(data, [n for n in range(20) if n % 2 != fold])
        loader = DataLoader(chosen, batch_size=4, shuffle=True)
        last = fold == 1
        if last:
            session = run.attach(model, optimizer)
            run.resume()
        else:
            session = scarctl.attach(model, optimizer, store=f"{run._store}-{fold}", interval=1)
            session.resume()
        for _ in session.epochs(2 * EPOCHS):
            for batch in session.batches(loader):
                train(model, optimizer, batch)
                if last:
                    run.iterated()
        if not last:
            session.close()


def stopped_early(run: Run) -> None:
    """Stop when the loss of an evaluation has not fallen for two epochs, and load the best weights."""
    model = net()
    best: dict[str, Any] = {"loss": 1e9, "waited": 0, "weights": copy.deepcopy(model.state_dict())}
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    session = run.attach(model, optimizer, extras={"best": best})
    run.resume()
    data = Digits()
    for _ in session.epochs(2 * EPOCHS):
        if best["waited"] >= 2:
            break
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()
        model.eval()
        with torch.no_grad():
            loss = float(functional.cross_entropy(model(data.x), data.y))
        model.train()
        if loss < best["loss"]:
            best.update(loss=loss, waited=0, weights=copy.deepcopy(model.state_dict()))
        else:
            best["waited"] += 1
    model.load_state_dict(best["weights"])


class Shifted(Sampler[int]):
    """Draws an order from its own generator, and has a state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        yield from torch.randperm(20, generator=self.generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["rng"])


def workers_and_sampler(run: Run, *, extras: bool) -> None:
    """Persistent workers, and a sampler with a state. extras: the user saves the sampler, too."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    sampler = Shifted()
    session = run.attach(model, optimizer, extras={"sampler": sampler} if extras else {})
    run.resume()
    loader = DataLoader(Digits(), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


def curriculum(run: Run) -> None:
    """Read longer data in each epoch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        loader = DataLoader(Digits(12 + 8 * epoch, noise=epoch > 1), batch_size=4, shuffle=True)
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


CRAFTS: dict[str, Callable[[Run], None]] = {
    "functional gradients": functional_gradients,
    "reentrant": reentrant,
    "parametrized": lambda run: parametrized(run, later=False),
    "parametrized later": lambda run: parametrized(run, later=True),
    "pruned": lambda run: pruned(run, later=False),
    "pruned later": lambda run: pruned(run, later=True),
    "sharpness": sharpness,
    "sparse": sparse,
    "masters": masters,
    "replay": lambda run: replay(run, saved=True),
    "replay, not saved": lambda run: replay(run, saved=False),
    "replay by hand": lambda run: replay(run, saved=True, ours=False),
    "contrast": contrast,
    "double average": double_average,
    "finder": finder,
    "folds": folds,
    "stopped early": stopped_early,
    "workers and sampler": lambda run: workers_and_sampler(run, extras=False),
    "workers and saved sampler": lambda run: workers_and_sampler(run, extras=True),
    "curriculum": curriculum,
}

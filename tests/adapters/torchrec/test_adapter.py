"""Test in one process what the adapter knows of sharded tables: rows that a step touches, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import scarctl
from scarctl.adapter import find_adapter
from scarctl.errors import UsageError

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make frameworks`")

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.warmup import WarmupOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.adapters.torchrec import models


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fused", ["sgd", "adagrad", "rowwise"])
def test_a_step_touches_the_rows_that_it_changes(fused: str) -> None:
    """Exactly the touched rows are reported, also for a table with two features, and after two backward passes."""
    model, optimizer = models.build("table", fused)
    adapter = find_adapter(model, [optimizer])
    begun: list[dict[str, torch.Tensor]] = []
    remove = adapter.install(lambda: begun.append(adapter.touched_rows(dense=False)), lambda: None)
    before: dict[str, torch.Tensor] = {}
    for step, passes in enumerate((1, 1, 2)):
        begun.clear()
        tables = {g.name: g.tensors[""] for g in adapter.groups() if ".embedding_bags." in g.name}
        assert len(tables) == 3
        assert {g.name for g in adapter.groups() if g.is_table} == tables.keys()
        before = {name: table.clone() for name, table in tables.items()}
        optimizer.zero_grad()
        for number in range(passes):
            model(models.batch(10 * step + number)).square().sum().backward()
        optimizer.step()
        if not step:
            continue  # rows were not requested before
        for name, table in tables.items():
            changed = (table != before[name]).any(1)
            touched = torch.zeros_like(changed)
            for rows in begun:
                if name in rows:
                    touched[rows[name]] = True
            assert torch.equal(touched, changed), name
            assert 0 < changed.sum() < len(changed)
    remove()
    model(models.batch(99)).sum().backward()
    assert len(begun) == 3, "removed hooks are called"  # two backward passes, and Adam's step


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kind", ["table", "copies", "dense"])
def test_a_module_outside_of_the_model_that_changes_is_reported(
    tmp_path: Path, kind: str, moves: bool
) -> None:
    """Tables run in modules that are not the model's either, and they are saved."""
    model, optimizer = models.build(kind, "rowwise")
    teacher, late = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    given = {"store": tmp_path / "store", "interval": 1, "extras": {"late": late}}
    with scarctl.attach(model, optimizer, **given) as session:
        for number in range(6):
            optimizer.zero_grad()
            found = model(models.batch(number))
            found.square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                late(teacher(found))
                late.weight.mul_(0.9)
                if moves:
                    teacher.weight.mul_(0.9)
        session.checkpoint(full=True, wait=True)
        kinds = [caveat.kind for caveat in session.caveats]
    assert ("outside-module" in kinds) is moves, kinds


def test_sequences_are_tables_too(tmp_path: Path) -> None:
    """With an EmbeddingCollection (unpooled lookups, without a dense part) a backward pass is an iteration."""

    def build() -> DistributedModelParallel:
        torch.manual_seed(0)
        model = EmbeddingCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingConfig(name="t0", embedding_dim=8, num_embeddings=20, feature_names=["a"]),
                EmbeddingConfig(name="t1", embedding_dim=8, num_embeddings=30, feature_names=["b"]),
            ],
        )
        apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
        sharder = EmbeddingCollectionSharder()
        ways = {"t0": table_wise(rank=0), "t1": table_wise(rank=0)}
        plan = construct_module_sharding_plan(
            model, ways, local_size=1, world_size=1, device_type="cpu", sharder=sharder
        )
        device = torch.device("cpu")
        return DistributedModelParallel(
            model, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder]
        )

    def train(model: DistributedModelParallel, store: Path, until: int) -> None:
        with scarctl.attach(model, store=store) as session:
            for step in range(session.resume().step, until):
                generator = torch.Generator().manual_seed(step)
                values = torch.randint(0, 20, (12,), generator=generator)
                features = KeyedJaggedTensor(
                    keys=["a", "b"], values=values, lengths=torch.tensor([3, 3, 2, 4])
                )
                sum(found.values().square().sum() for found in model(features).values()).backward()
            assert session.head_step == until

    whole, halves = build(), build()
    train(whole, tmp_path / "whole", 6)
    train(halves, tmp_path / "halves", 3)
    resumed = build()
    train(resumed, tmp_path / "halves", 6)
    expected = models.local_values(whole, whole.fused_optimizer)
    found = models.local_values(resumed, resumed.fused_optimizer)
    assert len(expected) == 4
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_sharded_module_alone_is_refused() -> None:
    """Without `DistributedModelParallel` the torch adapter would not save the state of fused optimizers."""
    model, _ = models.build("table")

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.module

    around = Around()
    dense = torch.optim.Adam(around.inner.over.parameters())
    with pytest.raises(UsageError, match="a table that TorchRec has sharded"):
        find_adapter(around, [dense])


def test_an_optimizer_with_a_state_of_its_own_is_refused() -> None:
    model, optimizer = models.build("table")
    with pytest.raises(UsageError, match="state of WarmupOptimizer cannot be saved yet"):
        find_adapter(model, [WarmupOptimizer(optimizer, [])])


def test_two_parts_of_a_table_on_one_rank_are_refused() -> None:
    """Two tensors of the same name cannot be distinguished."""
    torch.manual_seed(0)
    plain = models.Recommender(3)
    apply_optimizer_in_backward(torch.optim.Adagrad, plain.tables.parameters(), {"lr": 0.1})
    ways = {"t0": column_wise(ranks=[0, 0]), "t1": table_wise(rank=0), "t2": table_wise(rank=0)}
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        plain.tables, ways, local_size=1, world_size=1, device_type="cpu", sharder=sharder
    )
    model = DistributedModelParallel(
        plain, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    with pytest.raises(UsageError, match="several parts of"):
        find_adapter(model, [])

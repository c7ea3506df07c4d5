"""Test a rank's place for every rank of many meshes: real DTensors on torch's process group for one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from scarctl.errors import UsageError
from scarctl.state.layout import Place
from scarctl_adapters.torch import TorchAdapter
from scarctl_adapters.torch.sharding import local_part, place_of


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def part_at(whole: torch.Tensor, place: Place | None, shape: torch.Size) -> torch.Tensor:
    if place is None:
        return whole
    assert place.shape == whole.shape
    return whole[tuple(slice(o, o + n) for o, n in zip(place.offset, shape, strict=True))]


def assert_place(tensor: torch.Tensor, whole: torch.Tensor) -> int:
    part = local_part(tensor)
    assert torch.equal(part, part_at(whole, place_of(tensor, "w"), part.shape))
    return part.numel()


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (3, 4)])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 13, 27])
def test_a_strided_shard_cuts_what_others_have_cut(sizes: tuple[int, int], rows: int) -> None:
    """The mesh is that of FSDP2 on tensor parallel. If rows do not divide evenly, torch's own helper is wrong."""
    whole, elements = numbered(rows, 2), 0
    for rank in range(sizes[0] * sizes[1]):
        with rank_of(rank, sizes[0] * sizes[1]):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            part = whole
            for size, coordinate in ((sizes[1], rank % sizes[1]), (sizes[0], rank // sizes[1])):
                part = [*part.chunk(size), *[part[:0]] * size][coordinate]
            placements = [_StridedShard(0, split_factor=sizes[1]), Shard(0)]
            elements += assert_place(
                DTensor.from_local(
                    part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                ),
                whole,
            )
    assert elements == whole.numel()


@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Shard(-1), Shard(-2)]]
)
def test_sharded_over_two_dimensions_of_a_mesh(placements: list[Shard]) -> None:
    whole, elements = numbered(7, 5), 0
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (2, 3))
            elements += assert_place(distribute_tensor(whole, mesh, placements, src_data_rank=None), whole)
    assert elements == whole.numel()


def test_parts_that_are_no_boxes_or_no_values_yet_are_refused() -> None:
    with rank_of(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        strided = DTensor.from_local(
            numbered(4), mesh, [_StridedShard(0, split_factor=3), Shard(0)], run_check=False
        )
        with pytest.raises(UsageError, match="'w' is split into parts that are not boxes"):
            place_of(strided, "w")
        partial = DTensor.from_local(numbered(4), mesh, [Partial(), Shard(0)], run_check=False)
        with pytest.raises(UsageError, match="'w' is partial"):
            place_of(partial, "w")
        odd = DTensor.from_local(numbered(3), init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False,
                                 shape=torch.Size([16]), stride=(1,))  # fmt: skip
        with pytest.raises(UsageError, match=r"'w': this rank's part is \[3\]"):
            place_of(odd, "w")


def test_roles() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
            self.local = DistributedDataParallel(nn.BatchNorm1d(2))
            self.local.broadcast_buffers = False  # the argument is deprecated, and its replacement is too new
            self.expert = nn.Linear(2, 2)
            self.half = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0, 2]))

    with rank_of(2, 4):
        model = Model()
        adapter = TorchAdapter.build(model, [torch.optim.SGD(model.parameters())], replicated=["expert.w*"])
        roles = {g.name: (g.role, g.scope[:3]) for g in adapter.groups()}
        assert adapter.extras_per_rank
    shared, own = ("shared", ""), ("own", "")
    assert roles == {
        "trunk.0.weight": shared, "trunk.0.bias": shared, "trunk.1.weight": shared, "trunk.1.bias": shared,
        "trunk.1.running_mean": shared, "trunk.1.running_var": shared, "trunk.1.num_batches_tracked": shared,
        "local.weight": shared, "local.bias": shared,
        "local.running_mean": own, "local.running_var": own, "local.num_batches_tracked": own,
        "expert.weight": shared, "expert.bias": own,
        "half.weight": ("shared", "0+2"), "half.bias": ("shared", "0+2"),
    }  # fmt: skip


def test_parameters_that_ddp_ignores_are_each_ranks_own() -> None:
    with rank_of(0, 2):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["b.weight"])
        groups = TorchAdapter.build(DistributedDataParallel(model), []).groups()
    assert [g.name for g in groups if g.role == "own"] == ["b.weight"]


def test_alone_everything_is_this_process_own_and_named_without_wrappers() -> None:
    with rank_of(0, 1):
        model = DistributedDataParallel(nn.Linear(2, 2))
        adapter = TorchAdapter.build(model, [torch.optim.SGD(model.parameters())])
        groups = adapter.groups()
        assert [(g.name, g.role, g.place) for g in groups] == [("weight", "own", None), ("bias", "own", None)]
        assert not adapter.extras_per_rank


def test_what_is_not_supported_is_refused_with_a_way_out() -> None:
    with rank_of(0, 2), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, when it imports this
        from torch.distributed.optim import ZeroRedundancyOptimizer

        with pytest.raises(UsageError, match="fully_shard"):
            TorchAdapter.build(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), [])
        model = nn.Linear(4, 4)
        with pytest.raises(UsageError, match=r"'weigth' matches no tensor \(.*weight"):
            TorchAdapter.build(model, [], replicated=["weigth"])
        overlapping = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        with pytest.raises(UsageError, match="overlap_with_ddp"):
            TorchAdapter.build(model, [overlapping])

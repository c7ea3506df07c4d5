"""Test a rank that owns a part of the tables: their touched rows, and their rows per partition."""

from __future__ import annotations

import pytest
import torch

from scarctl.checkpoint.binding import layout_of
from scarctl.distributed.owned_adapter import OwnedAdapter
from scarctl.distributed.ownership import Division, Owned
from scarctl.errors import UsageError
from scarctl.store.settings import Settings
from scarctl_adapters.torch import TorchAdapter


def test_rows_may_be_given_for_a_tensor_that_another_rank_owns() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Embedding(10, 2) for name in ("a", "b")})
    whole = TorchAdapter.build(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    parts = (Owned(0, "a.weight", 0, 10, None), Owned(1, "b.weight", 0, 10, None))
    names = ("a.weight", "b.weight")
    division = Division(tuple((part,) for part in parts), (names, names), ())
    cuts = []
    for rank in range(2):
        owned = OwnedAdapter(whole, division, rank, whole.groups())
        layout = layout_of(owned, Settings(rows=(("a.*", 1),)))
        cuts.append([(group.name, group.partitions) for group in layout.groups])
        with pytest.raises(UsageError, match="matches no group"):
            layout_of(owned, Settings(rows=(("c.*", 1),)))
    assert cuts == [[("a.weight", 10)], [("b.weight", 1)]]


@pytest.mark.parametrize("sparse", [True, False])
def test_only_rows_that_the_rank_owns_are_named_by_their_numbers_there(sparse: bool) -> None:
    model = torch.nn.EmbeddingBag(10, 2, mode="sum", sparse=sparse)
    whole = TorchAdapter.build(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    parts = (Owned(0, "a/weight", 0, 4, None), Owned(0, "b/weight", 4, 10, None))
    division = Division(tuple((part,) for part in parts), (("a/weight",), ("b/weight",)), ())
    found = []
    for rank in range(2):
        owned = OwnedAdapter(whole, division, rank, whole.groups())
        assert [group.is_table for group in owned.groups()] == [sparse]
        model.zero_grad()
        model(torch.tensor([[1, 3, 4, 9, 9]])).sum().backward()
        rows = owned.touched_rows(dense=True)
        ((name, touched),) = rows.items()
        if not sparse:
            touched = touched.nonzero()[:, 0]
        found.append((name, sorted(set(touched.tolist()))))
    assert found == [("a/weight", [1, 3]), ("b/weight", [0, 5])]

"""Test the digests by which a resume notices that ranks had different values of what they have in common."""

from __future__ import annotations

import pytest
import torch

from scarctl.adapter import StateGroup
from scarctl.distributed.digests import Digests, digest_of
from scarctl.distributed.owned_adapter import holdings_of
from scarctl.distributed.ownership import divide
from scarctl.state.common import differ
from scarctl.state.layout import Place

WAYS = [
    "host",
    "sums",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.bool,
]


def on(way: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device. "sums": the host's tensors are added up as those of a GPU are."""
    if way == "sums":
        monkeypatch.setattr("scarctl.distributed.digests.is_gpu", lambda device: True)
    return "cuda" if way == "cuda" else "cpu"


def trained(scale: float = 1.0, role: str = "shared") -> list[StateGroup]:
    """Return a large and a small parameter with their slots, and a buffer."""
    tensors = {"": torch.arange(600.0).view(150, 4), "exp_avg": torch.ones(150, 4), "step": torch.zeros(150)}
    small = {"": torch.arange(3.0) * scale}
    return [
        StateGroup("large", "parameter", tensors, role=role),
        StateGroup("small", "parameter", small, role=role),
        StateGroup("mean", "buffer", {"": torch.zeros(4)}, role=role),
    ]


def digests(ranks: list[list[StateGroup]]) -> list[dict[str, str]]:
    division = divide([holdings_of(groups) for groups in ranks])
    return [Digests(division, rank).of(groups)() for rank, groups in enumerate(ranks)]


def test_equal_ranks_have_equal_digests_in_any_order() -> None:
    found = digests([trained(), trained()[::-1], trained()])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1
    assert not differ(found)


@pytest.mark.parametrize(("number", "slot"), [(0, ""), (0, "exp_avg"), (0, "step"), (1, "")])
def test_one_bit_that_differs_anywhere_is_found(number: int, slot: str) -> None:
    ranks = [trained(), trained()]
    values = ranks[1][number].tensors[slot].view(-1).view(torch.int32)
    values[-1] ^= 1
    assert differ(digests(ranks))
    values[-1] ^= 1
    assert not differ(digests(ranks))


def test_a_slot_that_only_one_rank_has_is_found() -> None:
    ranks = [trained(), trained()]
    slots = {name: tensor for name, tensor in ranks[1][0].tensors.items() if name != "step"}
    ranks[1][0] = StateGroup("large", "parameter", slots, role="shared")
    assert differ(digests(ranks))


def test_buffers_and_what_each_rank_owns_may_differ() -> None:
    ranks = [trained(), trained()]
    ranks[1][2].tensors[""].add_(1)
    assert not differ(digests(ranks))
    assert digests([trained(role="own"), trained(2.0, role="own")]) == [{}, {}]


def test_slots_that_one_rank_alone_has_are_not_compared() -> None:
    """ZeroRedundancyOptimizer: every rank has the parameter, one of them its slots."""
    ranks = [trained(), trained(role="replica")]
    ranks[1] = [
        StateGroup(g.name, g.kind, {"": g.tensors[""]}, role="shared" if g.kind == "buffer" else g.role)
        for g in ranks[1]
    ]
    found = digests(ranks)
    assert len(found[0]) == len(found[1]) == 1
    assert not differ(found)
    ranks[1][0].tensors[""][7] = 0
    assert differ(digests(ranks))


def test_each_part_is_compared_among_the_ranks_that_have_it() -> None:
    """HSDP: ranks 0 and 2 have one half of the rows, 1 and 3 the other."""

    def half(rank: int) -> list[StateGroup]:
        rows = torch.arange(8.0).view(4, 2)[rank % 2 * 2 :][:2].clone()
        return [StateGroup("table", "parameter", {"": rows}, Place((4, 2), (rank % 2 * 2, 0)), role="shared")]

    ranks = [half(rank) for rank in range(4)]
    found = digests(ranks)
    assert [len(each) for each in found] == [1] * 4
    assert found[0] == found[2] != found[1] == found[3]
    assert not differ(found)
    ranks[3][0].tensors[""][0] = 9
    assert differ(digests(ranks))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_form(dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row, at an odd place of its storage, transposed, of one value, and empty."""
    device = on(way, monkeypatch)
    flat = torch.arange(1 << 10).remainder(2).to(dtype).to(device)
    forms = [flat, flat[3:], flat.view(32, 32).t(), flat[1], flat[:0], flat[1].expand(5)]
    for form in forms:
        found = digest_of([("", form)])
        assert found == digest_of([("", form.clone(memory_format=torch.contiguous_format))])
        if form.numel():
            other = form.clone(memory_format=torch.contiguous_format)
            other.view(-1)[-1] = 1 - int(other.view(-1)[-1].real.float())
            assert found != digest_of([("", other)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_signs_that_differ_in_several_places(
    dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign is the highest bit of a value: in float64, and in each second float32, that of a word."""
    device = on(way, monkeypatch)
    values = torch.arange(1, 65, device=device).to(dtype)
    zeros = torch.zeros_like(values)
    some = zeros.clone()
    some[[3, 7]] = -0.0
    for one, other in [(values, -values), (zeros, -zeros), (zeros, some)]:
        assert digest_of([("", one)]) != digest_of([("", other)])


@pytest.mark.parametrize("way", WAYS)
def test_views_whose_values_torch_computes_when_they_are_read(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = on(way, monkeypatch)
    values = torch.complex(torch.arange(5.0), torch.arange(5.0)).to(device).conj()
    for view in (values, values.imag):
        assert digest_of([("", view)]) == digest_of([("", view.resolve_conj().resolve_neg().clone())])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_of_many_pieces(way: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = on(way, monkeypatch)
    large = torch.arange(5 << 20, dtype=torch.float32, device=device).view(-1, 1 << 10)
    large = large.t() if transposed else large
    found = digest_of([("", large)])
    assert digest_of([("", large)]) == found
    for row in (0, len(large) // 2, len(large) - 1):
        other = large.clone()
        other[row, 5] += 1
        assert digest_of([("", other)]) != found
    # Two pieces in another order have the same sums.
    assert digest_of([("", large.flip(0))]) != found

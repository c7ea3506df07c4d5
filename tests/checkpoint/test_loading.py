"""Test that large tensors are loaded in pieces, with the result of a copy by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scarctl.arena.arena import Arena
from scarctl.checkpoint.loading import copy_all, pieces_of, views_of
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.torch_dtypes import torch_of

ROWS, WIDE = 700, 1025


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, (ROWS, WIDE), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_rows_arrive_and_the_tensor_counts_it(dtype: torch.dtype) -> None:
    source, target = numbers(dtype), torch.zeros(ROWS, WIDE, dtype=dtype)
    before = target._version
    pieces = pieces_of(target[3:], source[3:])
    assert pieces
    assert target._version > before
    copy_all(pieces)
    assert torch.equal(target[3:], source[3:])
    assert not target[:3].any()


def test_what_torch_has_to_copy_is_left_to_it() -> None:
    source = numbers(torch.float32)
    assert not pieces_of(torch.zeros(WIDE, ROWS).t(), source)
    assert not pieces_of(torch.zeros(ROWS, WIDE, dtype=torch.float64), source)
    assert not pieces_of(torch.zeros(3, 4), torch.ones(3, 4))
    assert not pieces_of(
        torch.zeros(ROWS, WIDE, dtype=torch.complex64), torch.zeros(ROWS, WIDE, dtype=torch.complex64)
    )
    assert not pieces_of(torch.zeros(ROWS, WIDE, device="meta"), source)


def test_what_torch_refuses_is_refused() -> None:
    with torch.inference_mode():
        target = torch.zeros(ROWS, WIDE)
    with pytest.raises(RuntimeError, match="inference"):
        pieces_of(target, numbers(torch.float32))
    parameter = torch.nn.Parameter(torch.zeros(ROWS, WIDE))
    with pytest.raises(RuntimeError, match="leaf"):
        pieces_of(parameter, numbers(torch.float32))
    with torch.no_grad():
        copy_all(pieces_of(parameter, numbers(torch.float32)))
    assert torch.equal(parameter.detach(), numbers(torch.float32))


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (0, 4), (2, 3, 5)])
def test_views_are_the_arenas_rows(shape: tuple[int, ...]) -> None:
    dtypes = ("F32", "BF16", "I64", "U8", "F64", "BOOL")
    groups = [(f"g{n}", "parameter", (TensorSpec("", dtype, shape),)) for n, dtype in enumerate(dtypes)]
    arena = Arena.anonymous(build_layout(groups))
    views = views_of(arena.slot)
    for g, ((view,), group) in enumerate(zip(views, arena.layout.groups, strict=True)):
        rows = arena.rows(g, 0)
        rows[:] = (np.arange(rows.size) % 2).astype(np.uint8).reshape(rows.shape)
        assert (tuple(view.shape), view.dtype) == (shape, torch_of(group.tensors[0].dtype))
        assert view.reshape(-1).view(torch.uint8).numpy().tobytes() == rows.tobytes()
        view.fill_(1)
        assert rows.tobytes() == torch.ones_like(view).reshape(-1).view(torch.uint8).numpy().tobytes()

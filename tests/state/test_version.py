"""Test versions: epoch and step in one number, whose order is that of copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER, ages_of, epoch_of, pack, step_of

epochs = st.integers(1, MAX_EPOCH)
steps = st.integers(0, MAX_STEP)


@given(epochs, steps)
def test_roundtrip_in_int64(epoch: int, step: int) -> None:
    version = pack(epoch, step)
    assert 0 <= version < 1 << 63
    assert (epoch_of(version), step_of(version)) == (epoch, step)
    array = np.array([version, NEVER], dtype=np.int64)
    assert epoch_of(array).tolist() == [epoch, -1]
    assert step_of(array).tolist() == [step, -1]
    assert step_of(array).dtype == epoch_of(array).dtype == np.int64


@given(epochs, steps, epochs, steps)
def test_ordered_by_epoch_then_step(e: int, s: int, f: int, t: int) -> None:
    assert (pack(e, s) < pack(f, t)) == ((e, s) < (f, t))
    assert pack(e, s) > NEVER


def test_never_is_older_than_the_first() -> None:
    assert epoch_of(NEVER) == step_of(NEVER) == -1 < step_of(pack(1, 0))


@given(
    st.lists(st.tuples(epochs, st.integers(0, 99)) | st.none(), max_size=6), st.none() | st.integers(0, 99)
)
def test_ages_count_from_the_copy_or_a_later_seal(
    copies: list[tuple[int, int] | None], seal: int | None
) -> None:
    versions = np.array([NEVER if copy is None else pack(*copy) for copy in copies], dtype=np.int64)
    sealed = NEVER if seal is None else pack(MAX_EPOCH, seal)
    wanted = [91 if v < 0 else max(0, 90 - step_of(max(v, sealed))) for v in versions.tolist()]
    assert ages_of(versions, 90, sealed).tolist() == wanted
    many = np.tile(versions, 30_000)
    assert np.array_equal(ages_of(many, 90, sealed), np.tile(np.array(wanted, dtype=np.int64), 30_000))


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (MAX_EPOCH + 1, 0), (1, -1), (1, MAX_STEP + 1)])
def test_out_of_range(epoch: int, step: int) -> None:
    with pytest.raises(ValueError, match="is not in"):
        pack(epoch, step)

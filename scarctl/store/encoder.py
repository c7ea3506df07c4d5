"""Encode the partitions of a commit while its segment is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.encoding import decode, encode, encoded_groups, parts, squared_errors, stored_as
from scarctl.state.encodings import Encoding
from scarctl.state.layout import Layout, rows_of
from scarctl.store.segment import Source, full_piece, partition_rows
from scarctl.util.arrays import Bytes, Ids


class Encoder:
    """A source of exact rows, and the encoding in which a commit stores them."""

    def __init__(self, layout: Layout, encoding: Encoding, source: Source, ids: Ids) -> None:
        """ids: partitions of the commit, ascending. Raises UsageError as `stored_as` does."""
        self.encoding = encoding
        self.layout = stored_as(layout, encoding)
        """Layout of the stored data."""
        self.ids = ids
        self.lossy: NDArray[np.bool_] = encoded_groups(layout, encoding)[layout.group_of(ids)]
        """Which partitions have a tensor that is not stored exactly."""
        self.error = np.zeros(len(ids))
        """Squared error of each partition's parameter, float64; infinite where it is not finite. Filled by `pieces`."""
        self._exact = layout
        self._source = source

    @property
    def errors(self) -> NDArray[np.float64]:
        """`error` once all is written, -1 for partitions that are stored exactly: float64 (len(ids),)."""
        return np.where(self.lossy, self.error, -1.0)

    def exact_piece(self, g: int, t: int) -> int:
        """Return the bytes of a full piece of the live tensor that tensor `t` of the encoded group `g` is made of."""
        group = self._exact.groups[g]
        return max(1, full_piece(group, parts(group, self.encoding)[t].of))

    def pieces(self, g: int, t: int, local: Ids) -> Bytes:
        """Return the stored pieces of tensor `t` of the encoded group `g`, one after another.

        local: numbers of partitions within the group, ascending.
        """
        group = self._exact.groups[g]
        part = parts(group, self.encoding)[t]
        spec = group.tensors[part.of]
        ids = local + self._exact.base[g]
        per = group.rows_per_partition
        first, stop = int(local[0]) * per, min((int(local[-1]) + 1) * per, group.rows)
        rows = np.frombuffer(memoryview(self._source(g, part.of, first, stop)).cast("B"), np.uint8)
        rows = rows.reshape(stop - first, spec.row_bytes)
        index = rows_of(self._exact, g, ids)
        taken = rows if isinstance(index, slice) else rows[index - first]
        exact = taken.reshape(-1)
        stored = encode(exact, spec, part)
        if part.of == 0 and not part.is_scale and part.encoding != "exact":
            self._measure(g, ids, exact, stored)
        return stored

    def _measure(self, g: int, ids: Ids, exact: Bytes, stored: Bytes) -> None:
        """Note the errors of partitions whose parameter has these bytes, exact and stored."""
        group = self._exact.groups[g]
        spec = group.tensors[0]
        parameter = replace(group, tensors=group.tensors[:1])
        scales = [encode(exact, spec, part) for part in parts(parameter, self.encoding)[1:]]
        back = decode(parameter, self.encoding, [stored, *scales])[0]
        rows = partition_rows(group, int(ids[-1] - self._exact.base[g]))
        tail = rows * spec.row_bytes
        whole = full_piece(group, 0)
        full = len(ids) - (tail != whole)
        at = np.searchsorted(self.ids, ids)
        end = full * whole
        if full:
            self.error[at[:full]] = squared_errors(exact[:end], back[:end], spec.dtype, full)
        if full < len(ids):
            self.error[at[full:]] = squared_errors(exact[end:], back[end:], spec.dtype, 1)


def layout_of(layout: Layout, encoding: Encoding, what: object) -> Layout:
    """Return the layout of a segment's data. Raises Corruption, naming `what`, if the layout cannot be encoded so."""
    try:
        return stored_as(layout, encoding)
    except UsageError as error:
        raise Corruption(f"{what}: it is encoded, but {error.message}") from error

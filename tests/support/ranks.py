"""Make stores that several ranks have written, without any training: quickly, with values that a test knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.line import Word, write_line
from scarctl.state.extras import Notes
from scarctl.state.group import Place, TensorSpec
from scarctl.state.layout import Layout, build_layout
from scarctl.state.version import pack
from scarctl.store import (
    Store,
    StoreWriter,
    Topology,
    create_topology,
    newest_topology,
    open_writer,
    topology_epochs,
)

TABLE = (48, 8)
"""Shape divided by rows, with two slots."""
WIDE = (6, 12)
"""Shape divided by columns, with a slot."""
SMALL = (5, 3)
"""Shape owned completely by rank 0."""


def values(step: int, world: int) -> dict[str, np.ndarray]:
    """Return the whole state after `step`, as float32 arrays under the names that a file has."""
    rng = np.random.default_rng(step)
    shapes: dict[str, tuple[int, ...]] = {"small": SMALL, "scalar": ()}
    shapes |= {f"table{slot}": TABLE for slot in ("", "/exp_avg", "/exp_avg_sq")}
    shapes |= {f"wide{slot}": WIDE for slot in ("", "/exp_avg")}
    shapes |= {f"norm@{rank}": (4,) for rank in range(world)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sorted(shapes.items())}


def layout_of(rank: int, world: int) -> Layout:
    """Return the layout of what one of `world` ranks owns."""

    def specs(shape: tuple[int, ...], *slots: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(slot, "F32", shape) for slot in ("", *slots))

    start, stop = _span(TABLE[0], rank, world)
    left, right = _span(WIDE[1], rank, world)
    groups: list[Any] = [
        ("table", "parameter", specs((stop - start, 8), "exp_avg", "exp_avg_sq"), Place(TABLE, (start, 0))),
        ("wide", "parameter", specs((6, right - left), "exp_avg"), Place(WIDE, (0, left))),
        (f"norm@{rank}", "buffer", specs((4,))),
    ]
    if rank == 0:
        groups += [("small", "parameter", specs(SMALL)), ("scalar", "buffer", specs(()))]
    return build_layout(groups, rows={"table": 5, "wide": 2}, optimizer="Adam")


def _span(size: int, rank: int, world: int) -> tuple[int, int]:
    return size * rank // world, size * (rank + 1) // world


def belong(arena: Arena, store: Store) -> None:
    """Let an arena belong to a store in its present state, as if its process had opened it."""
    found = store.line()
    if found is not None:  # otherwise nobody has claimed it
        write_line(arena.folder, Word(1, 0, found.id, found.k))


def current_layout(store: Store) -> Layout:
    """Return the layout of a store that has one."""
    layout = store.current_layout()
    assert layout is not None
    return layout


def arena_of(store: Store, base: Path, **more: Any) -> Arena:
    """Return the arena of a run of this process that saves to `store`. The caller closes it."""
    folder = arena_folder(str(base), store.run_id)
    arena = Arena.create(folder, current_layout(store), run_id=store.run_id, epoch=1, **more)
    belong(arena, store)
    return arena


class RankStore:
    """The ranks of a job that save to a store at `path`. Starting it makes a topology, and every rank's writer."""

    def __init__(self, path: Path, world: int = 4, *, topology_only: bool = False) -> None:
        self.path, self.world = path, world
        self.store = Store.create(path)
        newest, used = newest_topology(self.store), self.store.shards()
        first = 1 + max([*used, *(newest.shards if newest else ())], default=-1)
        shards = tuple(range(first, first + world))
        if newest is not None and newest.world == world:
            shards = newest.shards  # a job that has restarted
        self.topology = Topology(1 + max(topology_epochs(self.store), default=0), shards, f"{world:064x}")
        create_topology(self.store, self.topology)
        self.layouts = [layout_of(rank, world) for rank in range(world)]
        self.writers: list[StoreWriter] = []
        for rank, layout in enumerate([] if topology_only else self.layouts):
            view = self.view(rank)
            self.writers.append(open_writer(view, layout=layout))

    def view(self, rank: int) -> Store:
        """Return the store as a rank sees it."""
        return self.store.of_shard(self.topology.shards[rank])

    def source(self, rank: int, step: int) -> Any:
        """Return the source that a rank gives to its writer."""
        whole, layout = values(step, self.world), self.layouts[rank]

        def read(group: int, tensor: int, start: int, stop: int) -> memoryview:
            return memoryview(rows_of(whole, layout, group, tensor)[start:stop])

        return read

    def save(
        self,
        step: int,
        ranks: Iterable[int] | None = None,
        *,
        sealed: bool = True,
        every: int = 1,
        whole: str = "",
        notes: Mapping[int, Notes] | None = None,
    ) -> RankStore:
        """Save what ranks own, or of every rank only each `every`-th partition, as of `step`.

        whole: the ranks' name of the state, if it is not the usual one. notes: what ranks note in their extras.
        """
        for rank in range(self.world) if ranks is None else ranks:
            ids = np.arange(0, self.layouts[rank].partitions, every)
            extras, seals = {"step": step, "rank": rank}, sealed and every == 1
            if notes is not None and rank in notes:
                extras |= notes[rank].to_tree()
            self.writers[rank].commit(
                ids,
                self.source(rank, step),
                step=step,
                sealed=seals,
                whole=(whole or self.whole(step)) if seals else "",
                extras=extras,
            )
        return self

    def whole(self, step: int) -> str:
        """Return the name that all ranks give to their state of a step."""
        return f"{self.topology.epoch:016x}{step:016x}"

    def close(self) -> RankStore:
        """End all ranks."""
        for writer in self.writers:
            writer.close()
        return self

    def arena(self, base: Path, rank: int, step: int, *, head: int | None = None) -> Arena:
        """Return a rank's arena with its part as of `step`. The caller closes it."""
        view, layout = self.view(rank), self.layouts[rank]
        epoch = max(1, view.state(self.topology.shards[rank]).epoch)
        arena = Arena.create(arena_folder(str(base), view.run_id), layout, run_id=view.run_id, epoch=epoch)
        belong(arena, view)
        everything = np.arange(layout.partitions)
        whole = values(step, self.world)
        begun = arena.begin_moment()
        assert begun is not None
        slot, moment = begun
        for g, group in enumerate(layout.groups):
            for t in range(len(group.tensors)):
                slot.rows(g, t)[:] = rows_of(whole, layout, g, t)
        slot.end(everything, pack(epoch, step), moment)
        arena.flip(slot, moment, pack(epoch, step), self.whole(step))
        arena.distance[:] = 0.0
        arena.reach(step if head is None else head)
        return arena


def rows_of(whole: dict[str, np.ndarray], layout: Layout, g: int, t: int) -> np.ndarray:
    """Return a rank's box of a whole tensor: uint8 of shape (rows, bytes per row)."""
    group = layout.groups[g]
    spec, found = group.tensors[t], whole[group.key(t)]
    if group.place is not None:
        found = found[tuple(slice(a, a + n) for a, n in zip(group.place.offset, spec.shape, strict=True))]
    raw: np.ndarray = np.frombuffer(np.ascontiguousarray(found).tobytes(), np.uint8)
    return raw.reshape(spec.rows, spec.row_bytes)


def tensors(step: int, world: int) -> dict[str, torch.Tensor]:
    """Return `values` as torch has them."""
    return {name: torch.from_numpy(np.array(value)) for name, value in values(step, world).items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path, weights_only=True)) if path.suffix == ".pt" else dict(load_file(path))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)

"""Hold the settings that are fixed when a store is created."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scarctl.errors import UsageError
from scarctl.state.layout import Cuttable, Layout, build_layout
from scarctl.store.format import MAX_SHARD, Fields, corrupt


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that are fixed when a store is created.

    partition_bytes: size of a partition in bytes; None: chosen from the size of the state. rows: (pattern, rows).
    """

    shards: int = 1
    seed: int = 0
    partition_bytes: int | None = None
    by_layer: bool = False
    rows: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= MAX_SHARD + 1:
            raise UsageError(f"shards must be 1..{MAX_SHARD + 1}, not {self.shards}")
        if not 0 <= self.seed < 1 << 62:
            raise UsageError(f"seed must be 0..2**62 - 1, not {self.seed}")
        if self.partition_bytes is not None and not 1 <= self.partition_bytes < 1 << 62:
            raise UsageError(f"partition_bytes must be at least 1, not {self.partition_bytes}")
        for pattern, count in self.rows:
            if not 1 <= count < 1 << 62:
                raise UsageError(f"rows per partition of {pattern!r} must be at least 1, not {count}")

    def layout(
        self, groups: Iterable[Cuttable], optimizer: str = "", elsewhere: Collection[str] = ()
    ) -> Layout:
        """Return the layout of a state that is cut as these settings say. See `build_layout`, also for its errors."""
        return build_layout(
            groups,
            partition_bytes=self.partition_bytes,
            rows=dict(self.rows),
            by_layer=self.by_layer,
            optimizer=optimizer,
            elsewhere=elsewhere,
        )

    @staticmethod
    def from_json(obj: object, what: object) -> Settings:
        f = Fields(obj, what)
        rows = f.raw("rows")
        if not isinstance(rows, list) or not all(
            isinstance(r, list) and len(r) == 2 and isinstance(r[0], str) and type(r[1]) is int for r in rows
        ):
            raise corrupt(what, "its settings are malformed")
        try:
            return Settings(
                shards=f.integer("shards"),
                seed=f.integer("seed"),
                partition_bytes=f.optional("partition_bytes"),
                by_layer=f.flag("by_layer"),
                rows=tuple((pattern, count) for pattern, count in rows),
            )
        except UsageError as error:
            raise corrupt(what, error.message) from error

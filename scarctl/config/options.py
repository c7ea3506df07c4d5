"""Define the groups of options that `scarctl.attach` takes. The class docstrings here document every option in them.

None always means: the environment's value, then that of `scarctl.toml`, then the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from scarctl.config.unknown import explained
from scarctl.state.encodings import Encoding

Policy: TypeAlias = Literal["aged", "priority", "round", "random", "full"]
NormName: TypeAlias = Literal["l2", "rms", "relative"]
Norm: TypeAlias = NormName | Callable[..., Any]
Tracker: TypeAlias = Literal["auto", "exact"]
OnError: TypeAlias = Literal["warn", "raise"]
PeerAck: TypeAlias = Literal["next", "all"]
Hooks: TypeAlias = Literal["auto", "begin", "off"]
Mode: TypeAlias = Literal["partial", "rollback", "auto"]

POLICIES: tuple[Policy, ...] = get_args(Policy)
NORMS: tuple[NormName, ...] = get_args(NormName)
MODES: tuple[Mode, ...] = get_args(Mode)
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)
DEFAULT_FRACTION = 1 / 8
DEFAULT_OVERHEAD = 0.01
DEFAULT_MAX_LOSS = 30.0
DEFAULT_MAX_LAG = 30.0
DEFAULT_POLICY: Policy = "aged"


@explained("partitioning")
@dataclass(frozen=True, kw_only=True)
class Partitioning:
    """How the state is divided. Fixed when the store is created; a contradiction later raises SettingsConflict.

    shards: Number of parts that fail together. The state is split among them at random. If several ranks train
        together, each of them is one shard, and this stays unset. Default: 1.
    seed: Seed of the random split into shards, and of the policy "random". Default: 0.
    partition_bytes: Size of a partition in bytes. Default: 1/1024 of the state, from 4 KiB to 1 MiB.
    by_layer: Make every tensor one partition. Excludes partition_bytes and rows. Default: False.
    rows: Rows per partition by pattern of tensor names, such as {"embeddings.*": 1}. The first match counts.
        Default: as many as partition_bytes holds.
    """

    shards: int | None = None
    seed: int | None = None
    partition_bytes: int | None = None
    by_layer: bool | None = None
    rows: Mapping[str, int] | None = None


@explained("selection")
@dataclass(frozen=True, kw_only=True)
class Selection:
    """Options for choosing the partitions that a checkpoint saves, and for restoring them.

    policy: Order in which partitions are saved. "aged" takes the largest squared change per byte, times its copy's age,
        first; "priority" the largest change per byte. "round" takes turns, "random" draws, "full" saves everything,
        every time. docs/when-not-to-use.md compares them. Default: "aged".
    norm: Distance between live values and their saved copy: "l2", "rms", "relative", or a function of (live, saved)
        that returns one distance per partition, such as `scarctl.checkpoint.distance.curvature`. Default: "l2".
    tracker: How far a partition is from the store's copy. "auto" adds up how far it has moved between the checkpoints
        in memory since then. "exact" compares the values with a copy of what the store has, which takes memory for
        another copy of the parameters; it is for studies. Default: "auto".
    encoding: How partial checkpoints store parameters and their slots: "exact", "bfloat16" (half of the bytes of
        float32) or "int8" (a quarter; one scale for each row). Fewer bits save more partitions with the same bytes.
        Copies in memory, flushes and whole checkpoints stay exact. A resume from encoded copies is mixed (see
        docs/benchmarks.md). Default: "exact".
    max_staleness: Age in iterations at which a changed partition is saved before all others. Default: no limit.
    """

    policy: Policy | None = None
    norm: Norm | None = None
    tracker: Tracker | None = None
    encoding: Encoding | None = None
    max_staleness: int | None = None


@explained("settings")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How saving behaves in this process and on this host.

    storage_options: Options for a remote store's file system: endpoint_url, key, secret, and others that fsspec takes.
        They stay in memory, and are never logged, shown or saved. Default: none.
    overhead: Share of training time that checkpoints in memory may take, above 0 and up to 1: the time for which
        training waits, and the processor time of copying. They are as frequent as this allows. Default: 0.01.
    max_loss: Longest time between two checkpoints in memory, in seconds or as text: "30s", "2m". For this they may
        take twice the `overhead`, and not more. Default: "30s".
    max_lag: With interval="auto", the store gets the whole state this often, in seconds or as text, if it can take it
        within this time. Otherwise it gets what changed most, all the time. Default: "30s".
    max_bandwidth: Bytes per second that checkpoints may write on average. Requires interval="auto". If several ranks
        train together, it holds for each of them. Default: no limit.
    flush_on_signal: On SIGTERM and SIGINT, copy the newest step to shared memory before the signal takes effect (see
        `Session.flush`). For this, extras are read and small buffers are copied after every step. Works only if attach
        is called in the main thread. Default: True.
    grace: Seconds between SIGTERM and SIGKILL, also as text: "25s", "2m". After SIGTERM the process stays that long at
        most, and brings to the store what changed most (see docs/evacuation.md). Default: it ends after the flush.
    on_error: "warn" logs and counts a fault while saving; "raise" raises it in the training loop. Default: "warn".
    daemon: True saves from the host's daemon, which outlives this process; False saves from a thread of this process.
        Default: the daemon, or the thread with a warning if the daemon cannot be started.
    arena_dir: Folder for the arena. Default: shared memory, or the temporary folder on hosts without it.
    pin_memory: Pin the arena if the state is on a GPU. Copies are faster, and the arena cannot be swapped out.
        Default: True.
    validate: Compare every copy with the live values before it is kept. This clones the state. Default: False.
    assume_single_writer: Create the store even if a file cannot be created exclusively. Nothing then keeps two
        writers apart. Default: False.
    timeout: Seconds that closing the session waits for the store. Default: 60.
    peers: Number of other hosts that keep a copy of this host's memory, each as large as the state. Needs several
        ranks or members, on several hosts, and the daemon. Default: 0; then no socket is open.
    peer_address: IP address of this host at which its daemon listens for other hosts. Default: for ranks the one that
        reaches the master (MASTER_ADDR); for members the one that reaches other hosts in the store.
    peer_domain: Name of the rack, zone or the like whose hosts fail together. Copies go to other domains.
        Default: each host is a domain of its own.
    peer_bandwidth: Bytes per second that each copy may send, at most. Default: no limit.
    peer_ack: Which hosts `Session.checkpoint(wait="peers")` waits for: "next", one that has acknowledged, or "all" that
        keep a copy. Default: "next".
    peer_tls: Three PEM files of this host: its certificate, its key, and the authority that has signed those of all
        hosts. Then all traffic between hosts is encrypted, and both sides verify each other. As text: the three
        paths, separated by commas. Default: none; copies cross the network unencrypted.
    peer_secret_file: File with the secret by which hosts recognize each other, the same on all of them. Only this user
        may read it. Members need it. Ranks with it also find memory on hosts that do not take part in a start.
        Default: rank 0 draws a secret at each start, and sends it over the process group.
    """

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    overhead: float | None = None
    max_loss: float | str | None = None
    max_lag: float | str | None = None
    max_bandwidth: float | None = None
    flush_on_signal: bool | None = None
    grace: float | str | None = None
    on_error: OnError | None = None
    daemon: bool | None = None
    arena_dir: str | os.PathLike[str] | None = None
    pin_memory: bool | None = None
    validate: bool | None = None
    assume_single_writer: bool | None = None
    timeout: float | None = None
    peers: int | None = None
    peer_address: str | None = None
    peer_domain: str | None = None
    peer_bandwidth: float | None = None
    peer_ack: PeerAck | None = None
    peer_tls: Sequence[str | os.PathLike[str]] | None = None
    peer_secret_file: str | os.PathLike[str] | None = None


@explained()
@dataclass(frozen=True)
class Extra:
    """An object in `extras` that is not the same on all ranks.

    value: Object with a state: state_dict() and load_state_dict(), a dict, or a random number generator.
    per_rank: Save each rank's own state. Otherwise all ranks are expected to have the same. Default: False.
    """

    value: Any
    per_rank: bool = False


@explained()
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How this process saves together with the other ranks of `torch.distributed`.

    replicated: Patterns of names, such as "router.*", of parameters that all ranks keep equal by other means than
        DistributedDataParallel or DTensor. Each byte of them is saved once. All others count as each rank's own.
        Default: none.
    """

    replicated: Sequence[str] = ()


@explained()
@dataclass(frozen=True)
class Member:
    """One of several processes that share a store and nothing else. `(2, 8)` is short for `Member(2, 8)`.

    number, count: This process is member `number` of `count`, from 0.
    divided: Tensors that are parts of common ones, by name: (first row, rows of the whole tensor). Only these can be
        divided among another number of members. All others are this member's own. Default: none.
    replaces: The number of members that the store may have now. They have ended, and these members take over what they
        saved. Without effect once the store has `count` members. Default: the number never changes.
    after: The epoch of those that are replaced, which `scarctl inspect` shows. Needed for a number that the store had
        before: otherwise a late start with old arguments would bring it back. Default: none.
    """

    number: int
    count: int
    divided: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    replaces: int | None = None
    after: int | None = None

"""Name the parts of one session that saving, resuming and its steps share."""

from __future__ import annotations

from dataclasses import dataclass

from scarctl.adapter import Adapter
from scarctl.checkpoint.binding import Binding
from scarctl.config import SessionSettings
from scarctl.session.gate import Gate
from scarctl.session.opening import Opening
from scarctl.session.peers import Together
from scarctl.session.progress import Progress
from scarctl.state.journal import Journal


@dataclass(frozen=True, slots=True)
class Parts:
    """The shared parts of one session."""

    adapter: Adapter
    settings: SessionSettings
    together: Together
    gate: Gate
    progress: Progress
    binding: Binding
    opening: Opening
    journal: Journal

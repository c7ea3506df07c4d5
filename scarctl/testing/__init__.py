"""For people who write an adapter: one suite of tests that every adapter passes. docs/adapters.md shows its use.

    from scarctl.testing import AdapterConformance, Training

A test module makes a subclass of `AdapterConformance` that says how a `Training` is made; pytest does the rest. Nothing
else of scarctl imports this package, and it needs pytest only to be collected.
"""

from __future__ import annotations

from scarctl.testing.suite import AdapterConformance
from scarctl.testing.training import Training, Visit

__all__ = ["AdapterConformance", "Training", "Visit"]

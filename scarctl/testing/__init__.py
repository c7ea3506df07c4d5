"""Test adapters: one conformance suite that every adapter passes. docs/adapters.md shows its use.

    from scarctl.testing import AdapterConformance, Training

A test module defines a subclass of `AdapterConformance` whose method `training` makes a `Training`. pytest collects and
runs the tests. No other package of scarctl imports this one.
"""

from __future__ import annotations

from scarctl.testing.suite import AdapterConformance
from scarctl.testing.training import Training, Visit

__all__ = ["AdapterConformance", "Training", "Visit"]

"""Measure the cost of failures for a workload, by the code that saves and restores in a session.

A `Study` names what is compared. `trial` fails one run and recovers it in every way that the study names. `workers`
runs trials in processes, `results` keeps them in a file, `summary` computes means and intervals, `chart` draws them.
"""

from scarctl.simulate.workload import Workload

__all__ = ["Workload"]

"""What losing a part of a run costs: failures replayed over a real workload, with the code that saves and restores.

A `Study` says what is compared, `trial` fails one run in every way that it names, `workers` runs trials in processes,
`results` keeps them in a file, `summary` says what they show, and `chart` draws it.
"""

from scarctl.simulate.workload import Workload

__all__ = ["Workload"]

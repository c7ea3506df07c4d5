"""Test that hyperparameters are found again where modules or parameters were added, removed or exchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from scarctl.session.changes import Changes


def _frozen(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def _set(model: nn.Sequential) -> None:
    model[1].p = 0.25


def _exchanged(model: nn.Sequential) -> None:
    model[1] = nn.Dropout(0.25)


def _another_kind(model: nn.Sequential) -> None:
    model[1] = nn.Softmax(1)


def _added(model: nn.Sequential) -> None:
    model.add_module("2", nn.Dropout(0.1))


def _removed(model: nn.Sequential) -> None:
    del model[1]


def _parameter_added(model: nn.Sequential) -> None:
    model[0].register_parameter("scale", nn.Parameter(model[0].bias.detach().clone()))


def _parameter_gone(model: nn.Sequential) -> None:
    model[0].bias = None


@pytest.mark.parametrize(
    "change",
    [_frozen, _set, _exchanged, _another_kind, _added, _removed, _parameter_added, _parameter_gone],
    ids=lambda f: f.__name__,
)
def test_a_change_is_read_as_a_new_reader_reads_it(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    changes = Changes(model.modules)
    before = dict(changes._read())
    assert changes._read() == before
    change(model)
    assert changes._read() == Changes(model.modules)._read()
    assert change in (_removed, _parameter_gone) or changes._read() != before

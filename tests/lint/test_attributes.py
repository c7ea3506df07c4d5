"""Name the attributes that training changes."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch

from scarctl.lint.attributes import Attributes, message


class Game:
    def __init__(self) -> None:
        self._x, self.generator = 0, np.random.default_rng(0)


class Agent:
    def __init__(self) -> None:
        self.buffer: deque[Any] = deque([(torch.zeros(2), 1)] * 50, maxlen=50)
        self.game, self.reward, self.width = Game(), 0.0, 16
        self.dice = random.Random(0)
        self.epsilons = {"first": 1.0}
        self.layer = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self._hidden = 0


def test_only_what_changes_is_named() -> None:
    agent = Agent()
    attributes = Attributes(agent)
    assert attributes.changed() == []
    agent.buffer.append((torch.ones(2), 1))
    agent.game._x += 1
    agent.reward += 1.0
    agent._hidden += 1
    agent.dice.random()
    agent.epsilons["first"] = 0.9
    with torch.no_grad():
        agent.layer.weight.add_(1)  # a module's own
    assert attributes.changed() == ["buffer", "game", "reward", "dice", "epsilons"]
    assert "of the module Agent, which training changes: buffer, game." in message(agent, ["buffer", "game"])


def test_reading_changes_nothing_and_what_is_saved_is_left_out() -> None:
    agent = Agent()
    attributes = Attributes(agent, {id(agent.game)})
    agent.game.generator.random()
    assert attributes.changed() == []
    state = random.getstate(), torch.random.get_rng_state()
    Attributes(agent).changed()
    assert random.getstate() == state[0]
    assert torch.equal(torch.random.get_rng_state(), state[1])
    other = Attributes(agent)
    agent.game.generator.random()
    assert other.changed() == ["game"]

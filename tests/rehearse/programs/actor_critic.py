"""Train an actor and a critic: one step an episode, and an environment that each episode seeds."""

import random
import sys
from typing import Any

import torch
from torch import nn

import scarctl


class Pole:
    """A pole to keep upright."""

    def reset(self, seed: int) -> torch.Tensor:
        self.random = random.Random(seed)
        self.angle, self.speed = self.random.uniform(-0.05, 0.05), 0.0
        return torch.tensor([self.angle, self.speed])

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self.speed += 0.2 * self.angle + (0.02 if action else -0.02) + self.random.gauss(0, 0.005)
        self.angle += self.speed
        return torch.tensor([self.angle, self.speed]), 1.0, abs(self.angle) > 0.5


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(2, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.affine1(x).relu()
        return self.action_head(x).softmax(-1), self.value_head(x)


def main(store: str) -> None:
    torch.manual_seed(543)
    env, model = Pole(), Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    session = scarctl.attach(model, optimizer, store=store)
    session.resume()
    running_reward = 10.0
    for episode in session.epochs(500):
        state, saved, rewards = env.reset(543 + episode), [], []
        for _ in range(30):
            probabilities, value = model(state)
            chosen: Any = torch.distributions.Categorical(probabilities)
            action = chosen.sample()
            saved.append((chosen.log_prob(action), value))
            state, reward, done = env.step(int(action))
            rewards.append(reward)
            if done:
                break
        running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
        returns = torch.tensor([sum(rewards[i:]) for i in range(len(rewards))])
        returns = returns / (returns.max() + 1e-6)
        losses = [
            -log * (r - v.item()) + (v.squeeze() - r) ** 2 for (log, v), r in zip(saved, returns, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        sys.stdout.write(f"episode {episode}: reward {running_reward:.2f}\n")
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])

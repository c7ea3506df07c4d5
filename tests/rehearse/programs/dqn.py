"""Train a DQN as Lightning's template does: memory, environment and reward are attributes of the module."""

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from scarctl_adapters.lightning import ScarCallback


class Walk:
    """An environment: keep a point near the middle."""

    def reset(self) -> np.ndarray[Any, Any]:
        self.x = np.random.uniform(-1, 1, 2).astype(np.float32)
        return self.x

    def step(self, action: int) -> tuple[np.ndarray[Any, Any], float, bool]:
        self.x = (
            self.x + np.float32(0.1 if action else -0.1) + np.random.normal(0, 0.05, 2).astype(np.float32)
        )
        return self.x, -float(np.abs(self.x).sum()), bool(np.abs(self.x).max() > 2)


class RLDataset(IterableDataset[Any]):
    def __init__(self, buffer: deque[Any]) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.buffer[np.random.randint(len(self.buffer))]


class DQN(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer: deque[Any] = deque(maxlen=200)
        self.env = Walk()
        self.state = self.env.reset()
        self.total_reward = 0.0
        for _ in range(50):
            self.play_step(1.0)

    @torch.no_grad()
    def play_step(self, epsilon: float) -> float:
        explore = np.random.random() < epsilon
        action = np.random.randint(2) if explore else int(self.net(torch.from_numpy(self.state)).argmax())
        new, reward, done = self.env.step(action)
        self.buffer.append((self.state, action, np.float32(reward), done, new))
        self.state = self.env.reset() if done else new
        return reward

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.total_reward += self.play_step(max(0.05, 1 - self.global_step / 50))
        states, actions, rewards, dones, new = batch
        values = self.net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            later = self.target_net(new).max(1)[0].masked_fill(dones, 0.0)
        if self.global_step % 10 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        return nn.functional.mse_loss(values, rewards + 0.99 * later)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RLDataset(self.buffer), batch_size=8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed_everything(0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = ScarCallback(store=sys.argv[1])
    Trainer(max_steps=500, accelerator="cpu", callbacks=[callback], **quiet).fit(DQN())

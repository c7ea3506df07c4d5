"""Define a recommender in TorchRec's own parts: three tables, and a few dense layers over them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

WIDTH = 64


class Recommender(nn.Module):
    """Predict how many stars a user gives a movie."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """counts: rows of each table, by its name."""
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=count, feature_names=[name])
                for name, count in counts.items()
            ],
        )
        self.over = nn.Sequential(nn.Linear(len(counts) * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Stars, float32 of shape (batch,)."""
        stars: torch.Tensor = self.over(self.tables(features).values()).squeeze(1)
        return stars

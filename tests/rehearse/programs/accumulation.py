"""Fine-tune in bfloat16 autocast, with gradients of two batches a step, clipping and a cosine schedule."""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import scarctl

ACCUMULATE = 2


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))


def main(store: str) -> None:
    model = build()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=100)
    loader = DataLoader(TensorDataset(torch.randn(48, 10), torch.randint(4, (48,))), 4, shuffle=True)
    session = scarctl.attach(model, optimizer, store=store, schedulers=scheduler)
    session.resume()
    for _ in session.epochs(20):
        for i, (x, y) in enumerate(session.batches(loader)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).float(), y) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])

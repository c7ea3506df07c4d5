"""Fine-tune a small BERT with Hugging Face's Trainer."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from scarctl_adapters.transformers import ScarCallback


class Reviews(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.tokens, self.labels = torch.randint(20, (28, 6)), torch.randint(2, (28,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main(store: str) -> None:
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes))
    arguments = TrainingArguments(
        output_dir=str(Path(store).with_name("output")),
        per_device_train_batch_size=4,
        max_steps=200,
        learning_rate=1e-3,
        warmup_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Reviews())
    trainer.add_callback(ScarCallback(trainer, store=store))
    trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])

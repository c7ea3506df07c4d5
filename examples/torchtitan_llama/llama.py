"""Define a small Llama of torchtitan, with all that its Trainer needs to train it on a CPU.

torchtitan 0.3.0 has no setting for that. What stands in the way is replaced here, and nothing else: the names of the
device, the metrics of its memory, attention whose backward pass exists on GPUs only, and for gloo a barrier that names
a device and sums that are scaled while they are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

if not torch.cuda.is_available():
    utils.device_type = "cpu"  # before other modules take both names
    utils.device_module = SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        synchronize=lambda: None,
    )

from datasets import Dataset
from torchtitan import trainer as titan
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

if not torch.cuda.is_available():
    dist_utils.set_pg_timeouts = lambda timeout, parallel_dims: None

BYTES = 256
TEXT = Path(argparse.__file__).read_text().split("\n\n")
DATASETS["argparse"] = DatasetConfig(
    "", lambda path: Dataset.from_dict({"text": TEXT}), lambda row: row["text"]
)
log = logging.getLogger("train")


class Bytes(BaseTokenizer):
    """Takes a text's bytes for tokens."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*text.encode(), 0] if add_eos else [*text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def get_vocab_size(self) -> int:
        return BYTES


class Losses(MetricsProcessor):
    """Keeps the losses and logs them, and does not look at a GPU's memory."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The settings of torchtitan."""

    def __init__(self, config: Config, **given: Any) -> None:
        self.config, self.color = config, utils.NoColor()
        stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats)
        self.ntokens_since_last_log, self.data_loading_times = 0, []
        self.losses: dict[int, float] = {}

    def log(self, step: int, global_avg_loss: float, *more: Any, **named: Any) -> None:
        self.losses[step] = global_avg_loss
        log.info("step %d loss %.4f", step, global_avg_loss)

    def close(self) -> None:
        """See `MetricsProcessor`."""


def model(width: int, layers: int, length: int, tied: bool = False) -> Any:
    """Return the specification of a Llama that reads bytes, with torch's own attention in 4 heads."""
    norm = {"weight": torch.nn.init.ones_}
    usual = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.05)}
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=BYTES,
        tok_embeddings=Embedding.Config(num_embeddings=BYTES, embedding_dim=width, param_init=usual),
        norm=RMSNorm.Config(normalized_shape=width, param_init=norm),
        lm_head=Linear.Config(in_features=width, out_features=BYTES, param_init=usual),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=width,
            n_heads=4,
            hidden_dim=2 * width,
            rope=ComplexRoPE.Config(dim=width // 4, max_seq_len=length, theta=500000, scaling="llama"),
            attn_backend="flex",
        ),
        enable_weight_tying=tied,
    )
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    usual_spec = llama3.model_registry("debugmodel")

    def parallelize(module: Any, **given: Any) -> Any:
        module = usual_spec.parallelize_fn(module, **given)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return module

    # Without the converter to Hugging Face's files, which needs one of them.
    return dataclasses.replace(usual_spec, model=config, parallelize_fn=parallelize, state_dict_adapter=None)


def adam(pattern: str = ".*", name: str = "AdamW", rate: float = 0.01) -> ParamGroupConfig:
    """Settings of the optimizer of parameters whose names match."""
    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": rate})


def config(
    folder: Path,
    steps: int,
    checkpoint: Any,
    *,
    spec: Any,
    length: int,
    batch: int = 2,
    groups: list[ParamGroupConfig] | None = None,
    loader: Any = None,
    dtype: str = "float32",
    accumulation: int = 1,
    ranks: int = 1,
    activation_checkpoint: Any = None,
    **parallel: Any,
) -> Any:
    """Return the configuration of a training.

    folder: for all that torchtitan writes. checkpoint: settings of the checkpoint manager. spec: see `model`.
    batch: sequences of `length` tokens, per data-parallel rank and micro-batch. accumulation: micro-batches of a step.
    ranks: number of data-parallel ranks. parallel: settings of torchtitan's parallelism.
    """
    return titan.Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        metrics=Losses.Config(log_freq=1),
        tokenizer=Bytes.Config(),
        dataloader=loader or HuggingFaceTextDataLoader.Config(dataset="argparse"),
        loss=CrossEntropyLoss.Config(),
        optimizer=OptimizersContainer.Config(param_groups=groups or [adam()], implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=batch,
            global_batch_size=batch * accumulation * ranks,
            seq_len=length,
            steps=steps,
            dtype=dtype,
            mixed_precision_param=dtype,
            disable_cuda_graphs=True,
        ),
        # With torch 2.13 the default fails on several ranks.
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallel}),
        checkpoint=checkpoint,
        activation_checkpoint=activation_checkpoint,
        debug=DebugConfig(seed=3),
    )

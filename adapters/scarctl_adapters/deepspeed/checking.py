"""Refuse engines whose state is elsewhere than ZeRO keeps it, when a session is attached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import distributed as dist

from scarctl.errors import UsageError
from scarctl.util.ranks import world_size


def check_engine(engine: Any, optimizers: list[Any]) -> None:
    """Raise UsageError, naming what stands in the way, unless this is an engine whose whole state can be saved.

    optimizers: those that `attach` was given next to the engine. Only the engine's own are allowed.
    """
    if type(engine) is not DeepSpeedEngine:
        raise UsageError(
            f"a {type(engine).__name__} cannot be saved, only the DeepSpeedEngine that deepspeed.initialize returns",
            hint="pipelines and hybrid engines keep parts of the model that no other rank has; see docs/deepspeed.md",
        )
    zero = engine.optimizer
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        raise UsageError(
            f"this engine's optimizer is a {type(zero).__name__}, not ZeRO's of stage 1, 2 or 3",
            hint=_hint(engine),
        )
    known = (zero, zero.optimizer, engine.basic_optimizer)
    for given in optimizers:
        if not any(given is one for one in known):
            raise UsageError(
                f"a {type(given).__name__} is not an optimizer of this engine",
                hint="attach the engine alone: it knows its optimizer",
            )
    for what, instead in _refused(engine, zero):
        raise UsageError(f"{what} cannot be saved", hint=instead)


def _hint(engine: Any) -> str:
    if engine.bfloat16_enabled() and engine.zero_optimization_stage() == 1:
        return "leave grad_accum_dtype out with bf16 and stage 1, or use stage 2"
    return "set zero_optimization.stage in DeepSpeed's configuration"


def _refused(engine: Any, zero: Any) -> Iterator[tuple[str, str]]:
    """Yield what cannot be saved, and what to do instead."""
    config = engine._config.zero_config
    for name, allowed in (("offload_optimizer", ("none", "cpu")), ("offload_param", ("none",))):
        offload = getattr(config, name)
        device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
        if device not in allowed:
            yield f"{name} to {device}", f"leave {name} out"
    if config.offload_optimizer is not None and config.offload_optimizer.ratio != 1:
        yield "offload_optimizer of a part (ratio), whose rest another optimizer has,", "leave ratio out"
    if engine.has_moe_layers:
        yield "experts in groups of ranks of their own (MoE)", "use FSDP2 with experts as plain modules"
    if config.zero_hpz_partition_size > 1 or config.zero_quantized_weights or config.zero_quantized_gradients:
        yield "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights or _gradients)", "leave it out"
    if config.zero_quantized_nontrainable_weights:
        yield "a quantized frozen base (zero_quantized_nontrainable_weights)", "leave it out"
    if dist.get_world_size(zero.dp_process_group) != world_size():
        yield "a model that is also divided by tensors or stages", "use data parallelism alone"
    if engine.data_efficiency_enabled():
        yield "the state of data efficiency (curricula, random layers)", "leave data_efficiency out"
    if zero.torch_autocast_gradscaler is not None:
        yield (
            "the gradient scaler of torch_autocast with float16",
            "use bfloat16, or fp16 instead of torch_autocast",
        )
    if any("use_muon" in group for group in zero.optimizer.param_groups):
        yield "Muon's updates of whole matrices", "use AdamW"
    if engine.is_deepcompile_enabled():
        yield "DeepCompile's engine", "leave compile.deepcompile out"

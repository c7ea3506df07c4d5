"""Find each rank's part of a model's tensors: DTensors (FSDP2, tensor parallel), DistributedDataParallel, ZeRO.

A rank's part of a tensor is its local part: the live storage, without autograd. Its position in the whole tensor is its
`Place`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scarctl.errors import UsageError
from scarctl.state.layout import Place, close_to
from scarctl.util.ranks import world_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_CHECKPOINTED = "_checkpoint_wrapped_module"
"""Part of the names of tensors in torch's wrapper for activation checkpointing; its own state_dict() omits it."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor. Does not import the slow module, which is loaded if a DTensor exists."""
    if type(tensor) in _PLAIN:  # called thousands of times per checkpoint
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def dtensor_class() -> type[DTensor] | None:
    """Return the class DTensor; None as long as no DTensor can exist."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part: the same storage and version counter, without autograd."""
    if is_dtensor(tensor):
        if not torch.is_grad_enabled():
            return tensor.to_local().detach()
        with torch.no_grad():  # with gradients enabled, autograd would track the view
            return tensor.to_local().detach()
    return tensor.detach()


def distinct_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part; of an expanded tensor, the elements that exist in memory."""
    part = local_part(tensor) if is_dtensor(tensor) else tensor
    for dim, stride in enumerate(part.stride()):
        if stride == 0 and part.shape[dim] > 1:
            part = part.narrow(dim, 0, 1)
    return part


def is_part_like(value: object, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return whether `value` has the parameter's shape, and this process has the same part of both."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if is_dtensor(parameter):
        return is_dtensor(value) and value.placements == parameter.placements
    return not is_dtensor(value)


def place_of(tensor: torch.Tensor, name: str) -> Place | None:
    """Return the place of this process's part; None when it is the whole tensor.

    Raises UsageError for partial sums, and for parts that are not boxes.
    """
    if not is_dtensor(tensor):
        return None
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "the caller omits tensors that only other ranks have"
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    for placement in tensor.placements:
        if placement.is_partial():
            raise UsageError(
                f"tensor {name!r} is partial: its values are not summed over ranks yet",
                hint="redistribute it to Replicate() or Shard() placements",
            )
    for dim in range(tensor.dim()):
        for mesh_dim in _order(tensor, dim, name):
            # As torch.chunk does it: the last parts may be shorter, or empty.
            step = -(-shape[dim] // mesh.size(mesh_dim))
            first = min(shape[dim], step * coordinate[mesh_dim])
            offset[dim] += first
            shape[dim] = min(step, shape[dim] - first)
    found = list(local_part(tensor).shape)
    if shape != found:
        raise UsageError(
            f"tensor {name!r}: this rank's part is {found}, not {shape} as by {tensor.placements}",
            hint="only tensors split as by torch.chunk are supported",
        )
    return None if shape == list(tensor.shape) else Place(tuple(tensor.shape), tuple(offset))


def _order(tensor: DTensor, dim: int, name: str) -> list[int]:
    """Return the mesh dimensions that split `dim`, in the order of the splits.

    A strided shard (FSDP2 on top of tensor parallel) splits parts that mesh dimensions to its right have split before.
    Its split factor is the number of these parts. torch's own `compute_local_shape_and_global_offset` splits in another
    order. For uneven sizes that gives other rows than the rank has (2.13: 27 rows on 3 x 4 ranks).
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(tensor.placements))):
        placement: Any = tensor.placements[mesh_dim]
        if not hasattr(placement, "dim") or placement.dim % tensor.dim() != dim:
            continue
        factor, before = getattr(placement, "split_factor", 1), 0
        while before < len(order) and math.prod(tensor.device_mesh.size(d) for d in order[:before]) < factor:
            before += 1
        if math.prod(tensor.device_mesh.size(d) for d in order[:before]) != factor:
            raise UsageError(
                f"tensor {name!r} is split into parts that are not boxes: {tensor.placements}",
                hint="redistribute it to Shard() placements",
            )
        order.insert(before, mesh_dim)
    return order


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor without a part in this process."""
    return is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None


def is_gathered(tensor: torch.Tensor, sharded: torch.Tensor) -> bool:
    """Return whether FSDP2 has gathered `tensor` from the DTensor `sharded` for a forward pass."""
    assert is_dtensor(sharded)
    return not is_dtensor(tensor) or tensor.device_mesh.ndim < sharded.device_mesh.ndim


def scope_of_ranks(ranks: Sequence[int]) -> str:
    """Return a short string for a set of ranks; "" for all ranks."""
    if len(ranks) == world_size():
        return ""
    text = ",".join(map(str, sorted(ranks)))
    return f"{min(ranks)}+{len(ranks)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def scope_of_group(group: Any) -> str:
    """Return the scope of a process group's ranks."""
    return scope_of_ranks(dist.get_process_group_ranks(group))


class Wrapping:
    """The wrappers of a model's modules, which determine the tensors that ranks keep equal."""

    def __init__(self, model: nn.Module, replicated: Sequence[str]) -> None:
        """replicated: patterns of equal tensors. Raises UsageError for a wrapper that is not supported."""
        self._replicated = tuple(replicated)
        self._ddp: list[tuple[str, DistributedDataParallel]] = []
        fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        module_of_fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for name, module in model.named_modules():
            if isinstance(module, fully_sharded):
                raise UsageError(
                    "FullyShardedDataParallel flattens parameters, so their rows cannot be separated",
                    hint="use torch.distributed.fsdp.fully_shard instead",
                )
            if isinstance(module, DistributedDataParallel):
                self._ddp.append((f"{name}." if name else "", module))
            if isinstance(module, module_of_fsdp2):
                # Frees the whole parameters that a forward pass may have gathered.
                module.reshard()
        self._alone = world_size() == 1
        self._scopes = {id(ddp): scope_of_group(ddp.process_group) for _, ddp in self._ddp}
        self._meshes: dict[Any, str] = {}

    def clean(self, name: str) -> str:
        """Return the name without wrappers."""
        for prefix, _ in reversed(self._ddp):
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
            elif f"{name}." == f"{prefix}module.":
                name = prefix[:-1]
        if _CHECKPOINTED in name:
            name = ".".join(part for part in name.split(".") if part != _CHECKPOINTED)
        return name

    def role(self, name: str, wrapped: str, tensor: torch.Tensor, *, buffer: bool = False) -> tuple[str, str]:
        """Return (role, scope) of a tensor. wrapped: its name including the wrappers."""
        if self._alone:
            return "own", ""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._replicated):
            return "shared", ""
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            if mesh not in self._meshes:
                self._meshes[mesh] = scope_of_ranks(mesh.mesh.flatten().tolist())
            return "shared", self._meshes[mesh]
        for prefix, ddp in self._ddp:
            inner = wrapped[len(prefix) + len("module.") :]
            if wrapped.startswith(f"{prefix}module.") and inner not in ddp.parameters_to_ignore:
                # Buffers that DDP does not broadcast are each rank's own.
                same = ddp.broadcast_buffers or not buffer
                return ("shared", self._scopes[id(ddp)]) if same else ("own", "")
        return "own", ""

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise UsageError when a pattern of `replicated` matches nothing."""
        for pattern in self._replicated:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"replicated: {pattern!r} matches no tensor", hint=close_to(pattern, names))


def zero_of(optimizer: Optimizer) -> Any:
    """Return a ZeroRedundancyOptimizer itself, otherwise None. Raises UsageError if it overlaps with DDP."""
    found = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    if not isinstance(optimizer, found):
        return None
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UsageError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps within the backward pass, when no step can be saved",
            hint="leave overlap_with_ddp at False",
        )
    return optimizer


def with_state(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: with ZeRO the inner one, for this rank's parameters."""
    zero = zero_of(optimizer)
    inner: Optimizer = optimizer if zero is None else zero.optim
    return inner


def params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Return the optimizer's parameters, in order."""
    return (p for group in optimizer.param_groups for p in group["params"])

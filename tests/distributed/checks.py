"""Check what has to hold of every setup, on every rank. Run by `launch`, several setups per slow start."""

from __future__ import annotations

import json
import traceback
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scarctl.distributed.owned_adapter import OwnedAdapter, broadcast_over, holdings_of, slots_of, spread
from scarctl.distributed.ownership import Division, Holding, divide
from scarctl.state import codec
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.torch_dtypes import name_of, plain, torch_of, torched
from scarctl_adapters.torch import TorchAdapter
from scarctl_adapters.torch.sharding import with_state
from tests.distributed.setups import SETUPS, Job

Values = dict[str, dict[str, torch.Tensor]]


def run(rank: int, world: int, names: list[str]) -> dict[str, str]:
    """Return by setup "" or the failure."""
    found = {}
    for name in names:
        try:
            check(rank, name)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other ranks may wait for this one
    return found


def check(rank: int, name: str) -> None:
    """Check everything about one setup."""
    torch.manual_seed(0)
    job = SETUPS[name][1]()
    adapter = build(job)
    before = divided(adapter)
    job.step(1)
    job.step(2)
    division = divided(adapter)
    assert division == before, "ownership changed with the first step"

    owned = OwnedAdapter(adapter, division, rank, adapter.groups())
    assert same(rebuilt(owned), job, adapter, division, rank)
    saved = {g.name: {s: t.clone() for s, t in g.tensors.items()} for g in owned.groups()}
    layout = layout_of(owned)
    layouts = [Layout.from_json(obj) for obj in gather(layout.to_json())]
    kept = through_extras(adapter.capture())

    torch.manual_seed(100 + rank)
    with torch.no_grad():
        for group in owned.groups():
            for tensor in group.tensors.values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor))
    spread(division, rank, adapter.groups(), broadcast_over(dist.group.WORLD))
    assert same(rebuilt(owned), job, adapter, division, rank), "not all of what was written is seen"
    forward_sees(job, name)
    shapes = [g.tensors[""].shape for g in adapter.groups()]
    job.step(3)
    assert shapes == [g.tensors[""].shape for g in adapter.groups()]

    finals = []
    for seed in (7, 8):
        torch.manual_seed(seed + (rank if name == "experts" else 0))
        job = SETUPS[name][1]()
        adapter = build(job)
        assert divided(adapter) == division
        owned = OwnedAdapter(adapter, division, rank, adapter.groups())
        owned.learn_slots(slots_of(layouts))
        owned.create_slots(layout)
        assert layout_of(owned) == layout
        with torch.no_grad():
            for group in owned.groups():
                for slot, tensor in group.tensors.items():
                    tensor.copy_(saved[group.name][slot])
        spread(division, rank, adapter.groups(), broadcast_over(dist.group.WORLD))
        owned.restore(kept)
        for seed in (4, 5):
            job.step(seed)
        finals.append(rebuilt(owned))
    assert equal(*finals), "what was restored is not all of the state"


def build(job: Job) -> TorchAdapter:
    return TorchAdapter.build(job.model, [job.optimizer], replicated=job.replicated)


def divided(adapter: TorchAdapter) -> Division:
    held = gather([holding.to_json() for holding in holdings_of(adapter.groups())])
    return divide([[Holding.from_json(obj) for obj in objs] for objs in held])


def layout_of(adapter: OwnedAdapter) -> Layout:
    return build_layout(
        [
            (
                group.name,
                group.kind,
                tuple(TensorSpec(s, name_of(t.dtype, s), tuple(t.shape)) for s, t in group.tensors.items()),
                group.place,
            )
            for group in adapter.groups()
        ]
    )


def through_extras(value: object) -> Any:
    text, tensors = codec.encode(plain(value))
    return torched(codec.decode(text, tensors))


def gather(value: object) -> list[Any]:
    """Return every rank's `value`, which is JSON."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()]))
    buffers = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    padded = torch.zeros_like(buffers[0])
    padded[: data.numel()] = data
    dist.all_gather(buffers, padded)
    return [json.loads(bytes(b[: int(n)].numpy())) for b, n in zip(buffers, sizes, strict=True)]


def rebuilt(adapter: OwnedAdapter) -> Values:
    """Return all stored tensors, assembled from what every rank owns. Every value comes from one rank."""
    mine = []
    for group in adapter.groups():
        for slot, tensor in group.tensors.items():
            place = None if group.place is None else [list(group.place.shape), list(group.place.offset)]
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
            dtype = name_of(tensor.dtype, group.name)
            mine.append([group.name, slot, dtype, list(tensor.shape), place, data])
    values: Values = {}
    counts: Values = {}
    for part in gather(mine):
        for name, slot, dtype, shape, place, data in part:
            whole, offset = place or (shape, [0] * len(shape))
            tensor = torch.frombuffer(bytearray.fromhex(data), dtype=torch_of(dtype)).view(shape)
            full = values.setdefault(name, {}).setdefault(slot, torch.empty(whole, dtype=tensor.dtype))
            count = counts.setdefault(name, {}).setdefault(slot, torch.zeros(whole))
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            full[box] = tensor
            count[box] += 1
    for name, slots in counts.items():
        for slot, count in slots.items():
            assert bool((count == 1).all()), f"{name} {slot}: {count}"
    return values


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def same(values: Values, job: Job, adapter: TorchAdapter, division: Division, rank: int) -> bool:
    """Return whether the assembled tensors are those of the model and its optimizer."""
    stored = {g.name: name for g, name in zip(adapter.groups(), division.names[rank], strict=True)}
    live = {
        name.replace("module.", ""): t
        for name, t in [*job.model.named_parameters(), *job.model.named_buffers()]
    }
    assert stored.keys() == live.keys(), (stored, live.keys())
    state = with_state(job.optimizer).state
    checked = set()
    for name, tensor in live.items():
        slots = {"": tensor, **state.get(tensor, {})}
        slots.pop("step", None)
        for slot, value in slots.items():
            assert torch.equal(values[stored[name]][slot], full(value)), (
                name,
                slot,
                values[stored[name]][slot],
                full(value),
            )
        if "norm.running" not in name:
            checked.add(stored[name])
    return True


def forward_sees(job: Job, name: str) -> None:
    """Check that FSDP's next gather has the written values: outputs equal those of a plain model with full tensors."""
    if name in ("experts", "fsdp-offload"):
        return
    model = job.model.module if hasattr(job.model, "module") else job.model
    twin = {cls.__name__: cls for cls in (type(model), *type(model).__mro__)}
    plain_class: type[nn.Module] = twin["Net"] if "Net" in twin else twin["Even"]
    reference = plain_class()
    reference.load_state_dict(
        {key: full(value) for key, value in job.model.state_dict().items()}
        if model is job.model
        else model.state_dict()
    )
    x = torch.rand(5, 6)
    dist.broadcast(x, 0)
    job.model.eval()
    with torch.no_grad():
        found, wanted = job.model(x), reference.eval()(x)
    job.model.train()
    assert torch.allclose(full(found), wanted, rtol=1e-4), (found, wanted)


def equal(first: Values, second: Values) -> bool:
    assert first.keys() == second.keys()
    for name, slots in first.items():
        for slot, value in slots.items():
            assert torch.equal(value, second[name][slot]), (name, slot)
    return True

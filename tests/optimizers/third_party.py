"""Make optimizers of other packages with their defaults: `make optimizers`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.optimizers.sweep import Case


def cases() -> Iterator[Case]:
    """Yield all optimizers of pytorch_optimizer, wrappers around Adam, and optimizers of smaller packages."""
    yield from _pytorch_optimizer()
    for package, names in {
        "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure",
                         "SGDScheduleFreeClosure", "RAdamScheduleFreeClosure"],
        "lion_pytorch": ["Lion"],
        "prodigyopt": ["Prodigy"],
        "optimi": ["Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW"],
        "galore_torch": ["GaLoreAdamW", "GaLoreAdafactor"],
        "torchao.optim": ["AdamW8bit", "Adam8bit", "AdamW4bit", "AdamWFp8", "_AdamW"],
        "bitsandbytes.optim": ["Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit", "Adam32bit", "PagedAdamW8bit"],
    }.items():  # fmt: skip
        module = importlib.import_module(package)
        for name in names:
            kind = getattr(module, name)
            made = functools.partial(_default, kind)
            yield Case(f"{package}-{name}", made, closure=name.endswith("Closure"))
            if "8bit" in name or "4bit" in name or "Fp8" in name:  # it keeps small ones uncompressed
                yield Case(f"{package}-{name}-wide", made, matrices=True, wide=12)
    kind = importlib.import_module("galore_torch").GaLoreAdamW
    yield Case("galore_torch-GaLoreAdamW-rank", functools.partial(_galore, kind), matrices=True)
    schedulefree = importlib.import_module("schedulefree")
    yield Case(
        "schedulefree-ScheduleFreeWrapper",
        lambda m: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(m.parameters(), lr=0.01), momentum=0.9),
    )
    yield Case("hand-tied", _tied)


def _pytorch_optimizer() -> Iterator[Case]:
    package = importlib.import_module("pytorch_optimizer")
    closures = {"bsam", "lbfgs"}
    grouped = {"distributedmuon", "demo"}
    two = {"spectralsphere", "adalomo", "demo"}  # their parameters have two dimensions
    matrices = {
        "muon",
        "distributedmuon",
        "adamuon",
        "adago",
        "normuon",
        "muonclip",
        "magma",
        "spectralsphere",
    }
    for name in package.get_supported_optimizers():
        kind = package.load_optimizer(name)
        for variant in ("matrices",) if name in two else ("", "matrices"):
            yield Case(
                f"pytorch_optimizer-{name}{'-' + variant if variant else ''}",
                functools.partial(_default, kind, use_muon=name in matrices or None, ranks=name in grouped),
                closure=name in closures,
                twice=name == "bsam",
                value=name == "alig",
                fused=name in {"lomo", "adalomo"},
                matrices=bool(variant),
                create_graph=name in {"adahessian", "sophiah"},
            )
    wrappers: dict[str, Callable[[Any, nn.Module], Any]] = {
        "Lookahead": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01), k=3),
        "ScheduleFreeWrapper": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01), momentum=0.9),
        "GradientCentralization": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01)),
        "OrthoGrad": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01)),
        "TRAC": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01)),
        "PCGrad": lambda w, m: w(torch.optim.AdamW(m.parameters(), lr=0.01)),
        "SAM": lambda w, m: w(m.parameters(), base_optimizer=torch.optim.AdamW, lr=0.01),
        "LookSAM": lambda w, m: w(m.parameters(), base_optimizer=torch.optim.AdamW, lr=0.01),
        "WSAM": lambda w, m: w(m, m.parameters(), base_optimizer=torch.optim.AdamW, lr=0.01),
        "FriendlySAM": lambda w, m: w(m.parameters(), base_optimizer=torch.optim.AdamW, lr=0.01),
    }
    for name, make in wrappers.items():
        if hasattr(package, name):
            kind = getattr(package, name)
            yield Case(
                f"pytorch_optimizer-{name}",
                functools.partial(make, kind),
                closure=name.endswith("SAM"),
                twice=name.endswith("SAM") and name != "WSAM",
            )


def _default(kind: Any, model: nn.Module, use_muon: bool | None = None, *, ranks: bool = False) -> Any:
    """Make an optimizer with its defaults. ranks: it needs a process group, of this process alone."""
    if ranks and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    names = inspect.signature(kind).parameters
    given: dict[str, Any] = {}
    if "num_data" in names:
        given |= {"num_data": 20, "foreach": False}
    if kind.__name__ == "SGD8bit":  # which supports only that
        given["momentum"] = 0.9
    if names.get("lr") is not None and names["lr"].default is inspect.Parameter.empty:
        given["lr"] = 0.01
    if "num_iterations" in names:
        given["num_iterations"] = 20
    if names.get("model") is not None:
        return kind(model, **given)
    if use_muon is not None:
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() == 2) == muon], "use_muon": muon}
            for muon in (True, False)
        ]
        return kind([group for group in groups if group["params"]], **given)
    return kind(list(model.parameters()), **given)


def _galore(kind: Any, model: nn.Module) -> Any:
    return kind(
        [
            {
                "params": list(model.parameters()),
                "rank": 2,
                "update_proj_gap": 3,
                "scale": 0.25,
                "proj_type": "std",
            }
        ],
        lr=0.01,
    )


def _tied(model: nn.Module) -> Any:
    model.twin = nn.Parameter(next(iter(model.parameters())).data)
    return torch.optim.Adam(model.parameters(), lr=0.01)

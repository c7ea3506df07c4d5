"""Test `scarctl export --weights` with a model's own `load_state_dict(strict=True)` and `from_pretrained`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

import scarctl
from scarctl.errors import Corruption, UsageError
from scarctl.ops import weights as module
from scarctl.ops.export import Exported, ExportSettings, export
from scarctl.state.extras import Extras
from scarctl.state.layout import TensorSpec


class Tied(nn.Module):
    """A tied head, a module under two names, a tied buffer, a buffer that is not persistent, BatchNorm's step count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.norm = nn.BatchNorm1d(4)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.same_norm = self.norm
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(6).view(2, 3))
        self.register_buffer("mask_too", self.mask)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.norm(self.embed(tokens)))
        logits: torch.Tensor = self.head(self.again(hidden))
        return logits


def train(model: nn.Module, store: Path, *others: nn.Parameter, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train, save everything, and return the model's state."""
    optimizer = torch.optim.AdamW([*model.parameters(), *others], lr=0.01)
    with scarctl.attach(model, optimizer, store=str(store)) as session:
        session.resume()
        for _ in range(steps):
            logits = model(torch.randint(0, 12, (6,) if isinstance(model, Tied) else (1, 6)))
            loss = (logits if isinstance(logits, torch.Tensor) else logits.logits).square().mean()
            (loss + sum(other.sum() for other in others)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def written(store: Path, output: Path, **options: object) -> Exported:
    return export(ExportSettings(store=str(store), output=output, weights=True, **options))  # type: ignore[arg-type]


def loads(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that the state has the names and values of the model's own, and that a new model loads it."""
    assert sorted(state) == sorted(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert fresh.head.weight is fresh.embed.weight


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def test_a_model_with_tied_weights(store: Path, tmp_path: Path) -> None:
    expected = train(Tied(), store, nn.Parameter(torch.ones(5)))
    done = written(store, tmp_path / "model.pt")
    assert (done.problems, done.tensors, done.consistent) == ((), len(expected), True)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    loads(state, expected)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(), "its bytes are there once"
    written(store, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()
    loads(load_file(tmp_path / "model.safetensors"), expected)


def test_several_files_and_dcp(store: Path, tmp_path: Path) -> None:
    expected = train(Tied(), store)
    written(store, tmp_path / "folder", max_shard_bytes=100)
    index = json.loads((tmp_path / "folder/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "folder" / file)
    loads(found, expected)
    written(store, tmp_path / "dcp", format="dcp")
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp_load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    loads(state, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_of_transformers(store: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=12, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    expected = train(model, store)
    assert "lm_head.weight" in expected
    for output, size in (("whole", 10**9), ("parts", 1000)):
        written(store, tmp_path / output, max_shard_bytes=size)
        config.save_pretrained(tmp_path / output)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
            tmp_path / output, output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        state = loaded.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    written(store, tmp_path / "model.pt")
    transformers.GPT2LMHeadModel(config).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


class Counting(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"count": 3}


def test_what_cannot_be_written_is_said(store: Path, tmp_path: Path) -> None:
    train(nn.Sequential(nn.Embedding(12, 4), Counting(4, 4)), store)
    (problem,) = written(store, tmp_path / "model.pt").problems
    assert "_extra_state" not in torch.load(tmp_path / "model.pt", weights_only=True)
    assert problem.endswith("misses it: 1")


def test_a_store_that_does_not_say_which_tensors_are_the_models(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is as older versions saved it."""
    to_tree = Extras.to_tree

    def older(self: Extras) -> dict[str, object]:
        tree = to_tree(self)
        return {**tree, "state": {key: value for key, value in tree["state"].items() if key != "model"}}

    monkeypatch.setattr(Extras, "to_tree", older)
    expected = train(Tied(), store)
    (problem,) = written(store, tmp_path / "model.pt").problems
    assert "does not record which tensors" in problem
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() < expected.keys()


@pytest.mark.parametrize(
    "tied", [{"a\x1b": "w"}, {"": "w"}, {"w": "w"}, {"__metadata__": "w"}, {7: "w"}, {"a": 7}]
)
def test_hostile_names_are_refused(tied: dict[object, object]) -> None:
    with pytest.raises(Corruption, match="which no model has"):
        module._tied(tied, {"w": None})


@pytest.mark.parametrize("shape", [[2, 4], [-2, -3], [True, 6], [6.0], "6", {}, [2, 3, 10**30]])
def test_hostile_shapes_are_refused(shape: object) -> None:
    with pytest.raises(Corruption, match="extras give 'w' the shape"):
        module._in_shape("w", TensorSpec("", "F32", (6,)), shape)


def test_vectors_get_the_shapes_of_the_model() -> None:
    spec = TensorSpec("", "F32", (6,))
    assert module._in_shape("w", spec, [2, 3]).shape == (2, 3)
    assert module._in_shape("w", TensorSpec("", "F32", (1,)), []).shape == ()
    assert module._in_shape("w", spec, None) is spec


def test_only_an_optimizers_tensors(store: Path, tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with scarctl.attach(nn.ReLU(), optimizer, store=str(store)) as session:
        session.resume()
        parameter.sum().backward()
        optimizer.step()
    with pytest.raises(UsageError, match="it contains no tensor of a model"):
        written(store, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()

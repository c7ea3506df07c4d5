"""Test state files: the tensors found in them, what is refused, and patching them in place."""

from __future__ import annotations

import io
import os
import pickle
import stat
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scarctl.errors import Corruption, ScarError, UsageError
from scarctl.formats.state_file import open_state
from scarctl.formats.state_writer import new_state, patch_state
from scarctl.state.layout import TensorSpec
from scarctl.state.torch_dtypes import NAME_TO_TORCH
from tests.formats.zoo import save_dcp, zoo


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal."""
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture(params=["state.safetensors", "state.pt", "state_dcp", "no_suffix"])
def zoo_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    if path.name == "state_dcp":
        save_dcp(dict(zoo()), path)
    elif path.suffix == ".pt":
        torch.save(zoo(), path)
    else:
        save_file(zoo(), path)
    return path


def test_every_dtype_is_read_bit_for_bit_whatever_the_format(zoo_file: Path) -> None:
    state = open_state(zoo_file)
    expected = zoo()
    assert list(state.specs) == sorted(expected)
    for name, tensor in expected.items():
        spec = state.specs[name]
        assert (spec.slot, NAME_TO_TORCH[spec.dtype], spec.shape) == ("", tensor.dtype, tuple(tensor.shape))
        assert same(state.tensor(name), tensor)
        rows = state.rows(name)
        assert rows.shape == (spec.rows, spec.row_bytes)
        assert rows.tobytes() == bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    assert state.nbytes == sum(t.numel() * t.element_size() for t in expected.values())
    assert [name for name, _, _ in state.groups()] == sorted(expected)


def test_nested_names_are_joined_with_dots(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "list": [torch.ones(1)],
        },
        tmp_path / "state.pt",
    )
    names = set(open_state(tmp_path / "state.pt").specs)
    assert {
        "model.weight",
        "model.bias",
        "optimizer.state.0.exp_avg",
        "optimizer.state.1.step",
        "list.0",
    } <= names


def test_views_and_strides_are_read_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"t": base.T, "part": base[1:3, ::2]}, tmp_path / "state.pt")
    state = open_state(tmp_path / "state.pt")
    assert state.rows("t").tobytes() == base.T.contiguous().numpy().tobytes()
    assert state.rows("part").tobytes() == base[1:3, ::2].contiguous().numpy().tobytes()


def test_a_legacy_torch_file_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert open_state(tmp_path / "old.pt").tensor("a").tolist() == [0.0, 1.0, 2.0]


def legacy(tensors: dict[str, torch.Tensor]) -> bytes:
    out = io.BytesIO()
    torch.save(tensors, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def test_a_legacy_file_claims_no_more_than_it_has(tmp_path: Path) -> None:
    path, good = tmp_path / "old.pt", legacy({"a": torch.zeros(77), "b": torch.zeros(2)})
    keys = good.rindex(b"\x80\x02]")
    assert good.count(b"K\x4d") == 2
    for bad, says in (
        (good.replace(b"K\x4d", b"J\0\0\0\x40"), "size"),
        (
            good[:keys] + b"\x80\x02]." + good[good.index(b"e.", keys) + 2 :].ljust(300)[:300],
            "claim more than",
        ),
        (good[: keys - 1] + b"]" * 1_000_000 + good[keys - 1 :], "too many parts"),
        (good[:keys] + b"\x80\x02X\xff\xff\xff\x7f" + bytes(100), "does not end"),
    ):
        path.write_bytes(bad)
        with pytest.raises(Corruption, match=says):
            open_state(path)


def test_a_tar_archive_that_begins_like_a_legacy_file_is_refused(tmp_path: Path) -> None:
    name = legacy({"a": torch.zeros(1)})[:15].decode("latin-1")
    with tarfile.open(tmp_path / "old.pt", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo(name + "x"))
    assert (tmp_path / "old.pt").read_bytes().startswith(legacy({})[:15])
    with pytest.raises(UsageError, match="tar archive"):
        open_state(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"not a state file at all, just text", UsageError, "known format"),
        ((100).to_bytes(8, "little") + b'{"a":', Corruption, "header claims 100"),
        ((2).to_bytes(8, "little") + b"{}", UsageError, "no tensors"),
        ((9).to_bytes(8, "little") + b'{"a": 12}', Corruption, "malformed"),
        (b"PK\x03\x04" + bytes(300), Corruption, "damaged or was not written to its end"),
    ],
)
def test_foreign_and_cut_off_files_are_refused(
    tmp_path: Path, content: bytes, error: type[ScarError], says: str
) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(error, match=says) as caught:
        open_state(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["state.safetensors", "state.pt"])
def test_every_cut_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tensors = {"a": torch.arange(100.0), "b": torch.ones(3, dtype=torch.int32)}
    save_file(tensors, path) if path.suffix != ".pt" else torch.save(tensors, path)
    data = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 30, len(data) // 2, len(data) - 100, len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises((Corruption, UsageError)):
            open_state(path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo unpickled > /dev/stderr; exit 7",)


def test_nothing_is_unpickled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.ones(2), "evil": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="more than tensors"):
        open_state(tmp_path / "evil.pt")
    save_dcp({"a": torch.ones(2)}, tmp_path / "folder")
    with (tmp_path / "folder" / ".metadata").open("wb") as file:
        pickle.Pickler(file).dump(Evil())
    with pytest.raises(Corruption, match="system"):
        open_state(tmp_path / "folder")
    assert "unpickled" not in capfd.readouterr().err


def test_an_archive_that_would_grow_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info, old.read(info), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        open_state(tmp_path / "b.pt")


def test_a_foreign_archive_and_a_folder_without_metadata_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UsageError, match=r"torch\.save did not write"):
        open_state(tmp_path / "some.zip")
    with pytest.raises(UsageError, match=r"without a \.metadata"):
        open_state(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_state(tmp_path / "missing.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        open_state(tmp_path / "pipe")


def test_tensors_that_a_layout_cannot_hold_are_named(tmp_path: Path) -> None:
    for bad in (
        torch.ones(2).expand(1000, 2),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
    ):
        torch.save({"fine": torch.ones(2), "bad.one": bad}, tmp_path / "state.pt")
        with pytest.raises(UsageError, match=r"bad\.one"):
            open_state(tmp_path / "state.pt")
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "state.pt")
    with pytest.raises(UsageError, match="two tensors are named"):
        open_state(tmp_path / "state.pt")


class TestDcp:
    def test_values_that_are_no_tensors_are_left_alone(self, tmp_path: Path) -> None:
        save_dcp(
            {"model": {"w": torch.arange(6.0)}, "epoch": 3, "groups": [{"lr": 0.1}]}, tmp_path / "folder"
        )
        state = open_state(tmp_path / "folder")
        assert list(state.specs) == ["model.w"]
        assert state.tensor("model.w").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def test_a_damaged_folder_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        save_dcp({"w": torch.arange(100.0)}, folder)
        (data,) = folder.glob("*.distcp")
        whole = data.read_bytes()
        data.write_bytes(whole[:200])
        with pytest.raises(Corruption, match="claim 400 bytes"):
            open_state(folder)
        data.write_bytes(bytes(len(whole)))
        with pytest.raises(Corruption):
            open_state(folder)
        data.unlink()
        with pytest.raises(Corruption, match="missing"):
            open_state(folder)
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:50])
        with pytest.raises(Corruption, match=r"\.metadata cannot be read"):
            open_state(folder)

    def test_metadata_is_not_waited_for_nor_paid_for_before_its_size_is_known(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        save_dcp({"w": torch.arange(100.0)}, folder)
        open_state(folder)
        tracemalloc.start()
        open_state(folder)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 24
        (folder / ".metadata").unlink()
        os.mkfifo(folder / ".metadata")
        with pytest.raises(Corruption, match="regular file"):
            open_state(folder)

    def test_metadata_without_its_fields_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        save_dcp({"w": torch.arange(100.0)}, folder)
        data = (folder / ".metadata").read_bytes()
        for name in (b"state_dict_metadata", b"storage_data", b"relative_path"):
            (folder / ".metadata").write_bytes(data.replace(name, name[:-1] + b"x"))
            with pytest.raises(Corruption):
                open_state(folder)

    def test_metadata_cannot_name_files_elsewhere(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        save_dcp({"w": torch.arange(100.0)}, folder)
        data = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../0_0.distc"))
        with pytest.raises(Corruption, match=r"name the file '\.\./0_0"):
            open_state(folder)


@pytest.fixture(params=[".safetensors", ".pt"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"state{request.param}"
    tensors = {"a": torch.arange(20.0).reshape(5, 4), "b": torch.tensor(3, dtype=torch.int16)}
    save_file(tensors, path) if path.suffix != ".pt" else torch.save({**tensors, "lr": 0.5}, path)
    path.chmod(0o640)
    return path


def contents(path: Path) -> dict[str, Any]:
    if path.suffix == ".pt":
        return dict(torch.load(path, weights_only=True))
    return dict(load_file(path))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_patching_changes_the_rows_and_nothing_else(small: Path) -> None:
    state = open_state(small)
    rows = np.full((2, 16), 255, dtype=np.uint8)
    with patch_state(state) as out:
        out.write("a", np.array([1, 3]), rows)
        out.write("b", slice(0, 1), np.array([[7, 0]], dtype=np.uint8))
        assert torch.equal(contents(small)["a"], torch.arange(20.0).reshape(5, 4))
        out.commit()
    after = contents(small)
    assert after["b"] == 7
    assert torch.isnan(after["a"][[1, 3]]).all()
    assert torch.equal(after["a"][[0, 2, 4]], torch.arange(20.0).reshape(5, 4)[[0, 2, 4]])
    assert after.get("lr", 0.5) == 0.5
    assert stat.S_IMODE(small.stat().st_mode) == 0o640
    assert left_in(small.parent) == [small.name]


def test_without_commit_nothing_changes(small: Path) -> None:
    before = small.read_bytes()
    with patch_state(open_state(small)) as out:
        out.write("a", slice(0, 1), np.zeros((1, 16), dtype=np.uint8))
    assert small.read_bytes() == before
    assert left_in(small.parent) == [small.name]


def test_a_file_that_changes_meanwhile_is_left_alone(small: Path) -> None:
    with patch_state(open_state(small)) as out:
        small.write_bytes(b"newer")
        with pytest.raises(ScarError, match="changed while it was being patched"):
            out.commit()
    assert small.read_bytes() == b"newer"
    assert left_in(small.parent) == [small.name]


def test_a_link_stays_and_its_target_is_patched(small: Path) -> None:
    link = small.with_name(f"link{small.suffix}")
    link.symlink_to(small)
    with patch_state(open_state(link)) as out:
        out.write("b", slice(0, 1), np.array([[9, 0]], dtype=np.uint8))
        out.commit()
    assert link.is_symlink()
    assert contents(small)["b"] == 9


def test_strided_tensors_are_patched_in_place(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"t": torch.arange(6.0).reshape(2, 3).T}, path)
    with patch_state(open_state(path)) as out:
        out.write("t", np.array([0, 2]), np.zeros((2, 8), dtype=np.uint8))
        out.commit()
    assert contents(path)["t"].tolist() == [[0.0, 0.0], [1.0, 4.0], [0.0, 0.0]]


def test_a_folder_cannot_be_patched(tmp_path: Path) -> None:
    save_dcp({"w": torch.ones(3)}, tmp_path / "folder")
    with pytest.raises(UsageError, match="cannot be patched in place"):
        patch_state(open_state(tmp_path / "folder"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_new_file_holds_what_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"new{suffix}"
    path.write_bytes(b"older")
    specs = {
        "odd": TensorSpec("", "U8", (3,)),
        "w[4:6]": TensorSpec("", "F32", (2, 2)),
        "bf": TensorSpec("", "BF16", ()),
        "empty": TensorSpec("", "F64", (0, 2)),
    }
    with new_state(path, specs) as out:
        out.write("odd", slice(0, 3), np.array([[1], [2], [3]], dtype=np.uint8))
        out.write("w[4:6]", slice(0, 2), np.arange(4, dtype="<f4").view(np.uint8).reshape(2, 8))
        out.write("bf", slice(0, 1), np.array([[0x80, 0x3F]], dtype=np.uint8))
        assert path.read_bytes() == b"older"
        out.commit()
    found = contents(path)
    assert sorted(found) == sorted(specs)
    assert found["odd"].tolist() == [1, 2, 3]
    assert found["w[4:6]"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert found["bf"] == torch.tensor(1.0, dtype=torch.bfloat16)
    assert found["empty"].shape == (0, 2)


def test_no_place_to_write_is_an_error_with_the_path(tmp_path: Path) -> None:
    specs = {"a": TensorSpec("", "U8", (1,))}
    with pytest.raises(UsageError, match="does not exist"):
        new_state(tmp_path / "missing" / "x.safetensors", specs)
    with pytest.raises(UsageError, match="not a regular file"):
        new_state(tmp_path, specs)

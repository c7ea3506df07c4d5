"""Test that the quickstart runs, and that its claims about its experiment are true."""

from __future__ import annotations

import gzip
import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.usefixtures("usual_saver")

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
FULL_EVERY = 32


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example's module `data`, under another name."""
    spec = importlib.util.spec_from_file_location("quickstart_data", FOLDER / "data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def write_idx(path: Path, array: NDArray[np.uint8], kind: int = 8) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_images(folder: Path, data: ModuleType, count: int) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    write_idx(folder / data.FILES[0], rng.integers(0, 256, (count, 12, 12), dtype=np.uint8))
    write_idx(folder / data.FILES[1], rng.integers(0, 10, count, dtype=np.uint8))


def quickstart(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, str(FOLDER / "quickstart.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.long
def test_act_one_compares_the_same_failure(tmp_path: Path) -> None:
    output = quickstart("--act", 1, "--quick", "--store", tmp_path / "stores")
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +([+-]\d+) +([+-]\d+)$", output, re.MULTILINE)
    assert len(rows) == 1
    seed, undisturbed, after, _, rollback = map(int, rows[0])
    assert seed == 0
    assert 0 < after < undisturbed
    # A rollback is exact: it costs the iterations since the last full checkpoint, neither more nor fewer.
    assert rollback == after % FULL_EVERY
    saved = [int(n) for n in re.findall(r"(\d+) kB saved per 32 iterations", output)]
    assert len(saved) == 2
    assert saved[0] <= 1.05 * saved[1]
    assert "partitions restored" in output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_act_two_kills_inspects_resumes_and_recovers(tmp_path: Path, data: ModuleType) -> None:
    write_images(tmp_path / "images", data, 600)
    output = quickstart("--act", 2, "--quick", "--data", tmp_path / "images")
    assert re.search(r"^  kill -9 \d+$", output, re.MULTILINE)
    assert "(stopped)" in output
    resumed = re.search(r"images: 600 images of 12x12 pixels; resumed after iteration (\d+)", output)
    assert resumed is not None
    assert int(resumed[1]) > 0
    assert "done: 60 iterations" in output
    assert "lost.safetensors is an ordinary safetensors file" in output
    assert output.count("intact") == 1
    folder = re.match(r"The stores are in (\S+) and are removed", output)
    assert folder is not None
    assert not Path(folder[1]).exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert "is not empty" in quickstart("--store", tmp_path, code=1)


def test_idx_files_are_read(tmp_path: Path, data: ModuleType) -> None:
    write_images(tmp_path / "mnist", data, 30)
    images = data.load(tmp_path / "mnist", 20)
    assert str(images) == "mnist: 20 images of 12x12 pixels"
    assert images.pixels.shape == (20, 1, 12, 12)
    assert 0 <= images.pixels.min() < images.pixels.max() == 1
    expected = np.random.default_rng(0).integers(0, 256, (30, 12, 12), dtype=np.uint8)
    assert np.array_equal((images.pixels[:, 0] * 255).round().numpy(), expected[:20])


def test_files_that_are_no_idx_are_refused(tmp_path: Path, data: ModuleType) -> None:
    write_idx(tmp_path / "floats.gz", np.zeros(4, dtype=np.uint8), kind=13)
    with pytest.raises(ValueError, match="not an IDX file of unsigned bytes"):
        data.read_idx(tmp_path / "floats.gz")
    (tmp_path / "short.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 9) + b"123"))
    with pytest.raises(ValueError, match="3 values"):
        data.read_idx(tmp_path / "short.gz")
    with pytest.raises(SystemExit, match="train-images"):
        data.load(tmp_path)


def test_digits_come_with_scikit_learn(data: ModuleType) -> None:
    images = data.load(None)
    assert str(images) == "digits: 1,797 images of 8x8 pixels"
    assert sorted(set(images.labels.tolist())) == list(range(10))

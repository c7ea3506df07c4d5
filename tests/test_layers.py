"""Test what import-linter cannot see: modules that an import really loads."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lazy import Lazy

PACKAGE = Path(__file__).parents[1] / "scarctl"

# The trainer's side. Every other module, the command line too, is importable without torch.
WITH_TORCH = {
    "scarctl.adapter",
    "scarctl.api",
    "scarctl.distributed.host_memory",
    "scarctl.checkpoint.binding",
    "scarctl.checkpoint.checkpointer",
    "scarctl.session.completing",
    "scarctl.formats.dcp",
    "scarctl.formats.dcp_check",
    "scarctl.checkpoint.distance",
    "scarctl.checkpoint.encoded",
    "scarctl.checkpoint.partly",
    "scarctl.state.torch_dtypes",
    "scarctl.checkpoint.engine",
    "scarctl.rehearse.state",
    "scarctl.rehearse.watcher",
    "scarctl.checkpoint.batched",
    "scarctl.checkpoint.copies",
    "scarctl.checkpoint.found_extras",
    "scarctl.session.attached",
    "scarctl.session.passes",
    "scarctl.session.generators",
    "scarctl.session.lost",
    "scarctl.lint.attributes",
    "scarctl.lint.unattached",
    "scarctl.session.departure",
    "scarctl.session.ending",
    "scarctl.session.saving",
    "scarctl.session.steps",
    "scarctl.session.gate",
    "scarctl.session.metrics",
    "scarctl.checkpoint.live_state",
    "scarctl.checkpoint.filling",
    "scarctl.checkpoint.loading",
    "scarctl.session.loop",
    "scarctl.checkpoint.step_end",
    "scarctl.checkpoint.motion",
    "scarctl.session.opening",
    "scarctl.checkpoint.pinning",
    "scarctl.session.progress",
    "scarctl.checkpoint.randomness",
    "scarctl.checkpoint.row_copies",
    "scarctl.distributed.coordinator",
    "scarctl.distributed.common",
    "scarctl.distributed.digests",
    "scarctl.distributed.rounds",
    "scarctl.distributed.reshard",
    "scarctl.distributed.heir",
    "scarctl.distributed.members",
    "scarctl.distributed.placed_adapter",
    "scarctl.distributed.leftover_arenas",
    "scarctl.distributed.owned_adapter",
    "scarctl.distributed.rescue",
    "scarctl.distributed.selector",
    "scarctl.distributed.collectives",
    "scarctl.distributed.copies",
    "scarctl.session.recover",
    "scarctl.session.resume",
    "scarctl.checkpoint.sent",
    "scarctl.session.session",
    "scarctl.simulate.trial",
    "scarctl.checkpoint.streams",
    "scarctl.testing",
    "scarctl.testing.killed_runs",
    "scarctl.testing.leaks",
    "scarctl.testing.harness",
    "scarctl.testing.fingerprint",
    "scarctl.testing.store_bytes",
    "scarctl.testing.suite",
    "scarctl.testing.training",
    "scarctl.checkpoint.touched",
    "scarctl.checkpoint.tracker",
    "scarctl.session.forecast",
    "scarctl.util.ranks",
}

# Imported where they are used, so that a command on a local store starts fast.
LATE = ("torch", "safetensors", "fsspec", "s3fs", "rich")

PROGRAM = """
import importlib, json, sys
loaded = {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    for late in json.loads(sys.argv[2]):
        if late in sys.modules and late not in loaded:
            loaded[late] = module
print(json.dumps(loaded))
"""


def modules() -> set[str]:
    files = (file.relative_to(PACKAGE.parent).with_suffix("") for file in PACKAGE.rglob("*.py"))
    return {".".join(file.parts).removesuffix(".__init__") for file in files} - {"scarctl.__main__"}


def first_to_load(names: list[str], late: tuple[str, ...]) -> dict[str, str]:
    """Return which of `late` get loaded when a new interpreter imports `names` in this order, and by which of them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names), json.dumps(late)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2]
    loaded: dict[str, str] = json.loads(done.stdout)
    return loaded


def test_the_core_and_the_command_line_load_nothing_heavy() -> None:
    assert first_to_load(sorted(modules() - WITH_TORCH), LATE) == {}


@pytest.mark.parametrize("heavy", ["numpy", "torch"])
def test_importing_the_package_alone_loads_neither_numpy_nor_torch(heavy: str) -> None:
    assert first_to_load(["scarctl"], (heavy,)) == {}


WITHOUT_TORCH = """
import importlib, json, sys
sys.modules["torch"] = None  # as if it were not installed
for module in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert error.name == "torch", error
    else:
        print(module)
"""


def test_the_list_of_modules_with_torch_is_no_longer_than_it_must_be() -> None:
    assert modules() >= WITH_TORCH
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(sorted(WITH_TORCH))],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LOCAL = """
import sys
from scarctl.cli.main import cli
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Store, open_writer, verify

layout = build_layout([("a", "parameter", (TensorSpec("", "F32", (4, 2)),))])
store = Store.create(sys.argv[1] + "/run", storage_options={"key": "x"})
with open_writer(store, layout=layout) as writer:
    writer.commit(writer.state.ids, lambda g, t, a, b: bytes(8 * (b - a)), step=1)
assert not verify(Store.open("file://" + sys.argv[1] + "/run"), read_data=True).problems
for command in (["inspect"], ["verify"], ["doctor", "--rounds", "1"]):
    try:
        cli.main([*command, "--store", sys.argv[1] + "/run", "--json"])
    except SystemExit as end:
        assert not end.code
assert not {"fsspec", "s3fs", "asyncio"} & set(sys.modules), sorted(sys.modules)
"""


def test_a_local_store_never_loads_fsspec(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


PLAIN = """
import sys
import torch
import scarctl

masked = "numpy.ma" in sys.modules
for seal in (True, False):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    session = scarctl.attach(model, optimizer, store=sys.argv[1] + "/run", interval=2)
    session.resume()
    for _ in session.epochs(session.epoch + 1):
        for batch in session.batches([torch.ones(4)] * 6):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        session.checkpoint(wait=True)
    session.close(seal=seal)
ours = sorted(name for name in sys.modules if name.startswith("scarctl"))
assert "scarctl.daemon.client" not in ours, "a thread saves"
assert len(ours) <= 180, (len(ours), ours)
assert ("numpy.ma" in sys.modules) == masked, "a function for sets loads masked arrays: 8 ms within a training"
"""


def test_a_plain_session_imports_at_most_180_modules(tmp_path: Path) -> None:
    """Train twice in one process with a local store: the second session resumes."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)],
        cwd=PACKAGE.parent,
        env={**os.environ, "SCARCTL_DAEMON": "0", "SCARCTL_ARENA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_looking_at_a_lazy_module_as_pytest_does_imports_nothing() -> None:
    lazy = Lazy("no_module_of_this_name")
    assert inspect.unwrap(lazy) is lazy
    assert getattr(lazy, "_mock_name", None) is None
    with pytest.raises(ModuleNotFoundError):
        lazy.anything()

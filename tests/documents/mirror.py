"""Check that the tests mirror the tree: tests of scarctl/x/y.py are in tests/x, found by name or by import.

A module's tests are in `tests/x/test_y.py`, in `tests/x/test_y_*.py`, or in a file of `tests/x` that imports from it.
The modules for which none of this is so are listed here, with the place of their tests and the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.documents.sources import ROOT, nodes

TESTS = ROOT / "tests"
SOURCES = {
    "scarctl": (ROOT / "scarctl", TESTS),
    "scarctl_adapters": (ROOT / "adapters" / "scarctl_adapters", TESTS / "adapters"),
}

ELSEWHERE: dict[tuple[str, str], str] = {
    ("session", "one process's training: only a whole session shows whether its parts agree"): """
        scarctl.checkpoint.checkpointer scarctl.checkpoint.copies
        scarctl.checkpoint.copied
        scarctl.checkpoint.filling scarctl.checkpoint.found_extras
        scarctl.checkpoint.step_end
        scarctl.recovery.memory scarctl.session.attached scarctl.session.completing scarctl.session.generators
        scarctl.session.loop scarctl.session.passes
        scarctl.session.progress scarctl.session.recover scarctl.session.resumed scarctl.session.resume
        scarctl.session.snapshot scarctl.session.steps
        scarctl_adapters.torch.settings""",
    ("distributed", "several ranks: each needs processes that agree"): """
        scarctl.distributed.coordinator
        scarctl.distributed.heir scarctl.distributed.own_extras scarctl.distributed.placed_adapter
        scarctl.distributed.reshard scarctl.session.peers scarctl.util.ranks
        scarctl_adapters.torch.mixing scarctl_adapters.torch.sharding""",
    ("theory", "what is measured is checked with the theory that reads it"): """
        scarctl.checkpoint.motion""",
    ("daemon", "by the daemon's requests, and `scarctl daemon status`"): """
        scarctl.daemon.host_saver""",
    ("cli", "by the command that prints it: its output is what a user sees"): """
        scarctl.cli.about scarctl.cli.completion scarctl.cli.doctor scarctl.cli.export scarctl.cli.groups
        scarctl.cli.live scarctl.cli.man scarctl.cli.report_page
        scarctl.formats.dcp scarctl.formats.dcp_check scarctl.formats.hf_index
        scarctl.ops.checkpoint scarctl.ops.known scarctl.ops.live scarctl.ops.recover
        scarctl.ops.report scarctl.ops.sinks scarctl.ops.store_source scarctl.ops.verify_file
        scarctl.peers.probe scarctl.recovery.forecast scarctl.recovery.label scarctl.recovery.members
        scarctl.simulate.worker scarctl.simulate.workers
        scarctl.store.saved scarctl.store.visible_damage""",
    (
        "cli/test_schemas.py",
        "a type of a part of documents: the schemas are checked with every command's output",
    ): """
        scarctl.persist.space""",
    ("store", "by reading and writing a store: a file's bytes count, not the function that wrote them"): """
        scarctl.store.backends.parallel scarctl.store.claim
        scarctl.store.publish scarctl.store.read scarctl.store.segment_reader scarctl.store.segment_writer
       """,
    ("state", "data classes that layouts are made of"): "scarctl.state.group",
    ("test_api.py", "by calls that a user may get wrong"): """
        scarctl.config.unknown scarctl_adapters.options""",
    (
        "adapters/test_conformance_mutants.py",
        "the published suite: adapters that are wrong in one way each fail it",
    ): """
        scarctl.adapter scarctl.testing.fingerprint scarctl.testing.harness scarctl.testing.killed_runs
        scarctl.testing.leaks scarctl.testing.store_bytes scarctl.testing.suite scarctl.testing.training""",
    ("adapters", "by the loops of the framework, stopped and resumed"): """
        scarctl.stateful scarctl_adapters.settled
        scarctl_adapters.deepspeed.checking scarctl_adapters.deepspeed.optimizer_state
        scarctl_adapters.deepspeed.partitions scarctl_adapters.deepspeed.stepping
        scarctl_adapters.jax.adapter scarctl_adapters.jax.arrays scarctl_adapters.jax.session
        scarctl_adapters.jax.tree
        scarctl_adapters.lightning.late_state scarctl_adapters.lightning.loops
        scarctl_adapters.lightning.data_order scarctl_adapters.lightning.position
        scarctl_adapters.torch.attributes scarctl_adapters.torch.lost
        scarctl_adapters.torch.checking scarctl_adapters.torch.homes
        scarctl_adapters.torch.names scarctl_adapters.torch.packing
        scarctl_adapters.torchrec.lookups scarctl_adapters.torchrec.optimizers
        scarctl_adapters.torchrec.tables scarctl_adapters.torchtitan.position
        scarctl_adapters.transformers.callback scarctl_adapters.transformers.progress""",
}


@cache
def imported(path: Path) -> set[str]:
    """Return the names of modules, and of objects taken from them, that a file imports."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def without_mirror() -> set[str]:
    """Return the modules whose tests are found neither by name nor by an import in the folder of the same name."""
    found = set()
    for package, (source, tests) in SOURCES.items():
        for path in source.rglob("*.py"):
            name = path.relative_to(source)
            folder, stem = tests / name.parent, name.stem.lstrip("_")
            module = ".".join((package, *name.with_suffix("").parts))
            if stem in ("_init__", "init__", "main__"):
                continue  # lists of names, and the start of a program
            if (folder / f"test_{stem}.py").exists() or any(folder.glob(f"test_{stem}_*.py")):
                continue
            if not any(module in imported(test) for test in folder.glob("test_*.py")):
                found.add(module)
    return found


def findings() -> Iterator[str]:
    """Yield the modules without a test in their place, and what is wrong with the list of the others."""
    listed = [module for modules in ELSEWHERE.values() for module in modules.split()]
    lacking = without_mirror()
    for module in sorted({module for module in listed if listed.count(module) > 1}):
        yield f"tests/documents/mirror.py: {module} is listed twice"
    for module in sorted(lacking - set(listed)):
        yield f"{module} has no test: write tests/x/test_y.py for scarctl/x/y.py"
    for module in sorted(set(listed) - lacking):
        yield f"tests/documents/mirror.py: {module} has tests of its own now, or is gone: remove it from the list"
    for place, _ in ELSEWHERE:
        if not (TESTS / place).exists():
            yield f"tests/documents/mirror.py: tests/{place} does not exist"

"""Try every code block of the documents: Python runs, commands have the options they are given, shell parses."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from scarctl.cli.main import cli
from tests.documents.names import ALL, ROOT
from tests.support import forkserver
from tests.test_readme import PROGRAMS, blocks

pytestmark = pytest.mark.usefixtures("usual_saver")

PROGRAM = """
import logging, os, types
import torch
import scarctl
model = torch.nn.ModuleDict({"router": torch.nn.Linear(8, 8), "experts": torch.nn.Linear(8, 2)})
model.forward = lambda x: model["experts"](model["router"](x))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = [(torch.rand(4, 8), torch.randint(0, 2, (4,))) for _ in range(3)]
loss_of = torch.nn.CrossEntropyLoss()
evaluate = lambda model: model(loader[0][0])
steps = 3
"""
RECORDERS = """
seen = []
def record(*arguments, **named):
    seen.append(arguments)
wandb = types.SimpleNamespace(log=record)
writer = types.SimpleNamespace(add_scalar=record)
run = types.SimpleNamespace(log_metrics=record)
session = scarctl.attach(model, optimizer, store="logged")
optimizer.step()
loss = torch.ones(())
"""
FRAGMENTS = {
    "docs/loops.md": ("", "assert session.head_step == 30"),
    "docs/howto/experts.md": ('os.makedirs("shared")', ""),
    "docs/evacuation.md": ("", "assert session.settings.grace == 25; session.close()"),
    "docs/howto/gpu.md": ("", ""),
    "docs/metrics.md": (RECORDERS, "assert len(seen) > 10; session.close()"),
}
"""Blocks that need preparation: the code before them, and what holds afterwards. The first block of each document."""
ELSEWHERE = {
    "docs/adapters.md": "tests/adapters/test_adapters_document.py, and the parts of a suite",
    "docs/frameworks.md": "tests/adapters, which train with each framework",
    "docs/jax.md": "tests/adapters/jax, where JAX is installed",
    "docs/torchtitan.md": "tests/adapters/torchtitan, where torchtitan is installed",
    "docs/object-stores.md": "tests/store/conformance, against a server",
    "docs/elastic.md": "tests/examples/test_elastic.py: it needs ranks",
    "docs/peers.md": "tests/peers: a process alone has none",
    "docs/ray.md": "tests/adapters, where Ray is installed",
    "docs/workbench.md": "tests/test_readme.py",
}
"""Documents whose Python is compiled here, and runs in other tests."""
WORDS = r"(scarctl [^#'\n]*(?:'[^'\n]*'[^#'\n]*)*)"
COMMANDS = {r"sh": rf"^(?:exec |trap ')?{WORDS}", r"(?:console|text)": rf"^\$ {WORDS}"}
"""Commands in blocks of these languages."""


def every(pattern: str) -> list[tuple[str, str]]:
    """Return document and content of every block whose first line matches."""
    return [
        (document, found[1])
        for document in (*ALL, "docs/FORMAT.md")
        for found in re.finditer(
            rf"^```{pattern}\n(.*?)^```$",
            (ROOT / document).read_text(encoding="utf-8"),
            re.MULTILINE | re.DOTALL,
        )
    ]


def test_every_document_with_python_is_tried_somewhere() -> None:
    found = {document for document, _ in every(r"python[^\n]*")}
    assert found == {*PROGRAMS, *FRAGMENTS, *ELSEWHERE}
    for document, text in every(r"python[^\n]*"):
        compile(text, document, "exec")


@pytest.mark.parametrize("document", FRAGMENTS)
def test_fragments_run(document: str, tmp_path: Path) -> None:
    before, after = FRAGMENTS[document]
    (first, *_) = blocks(document, "python no-run") or blocks(document, "python")
    program = "\n".join([PROGRAM, before, first.replace('"/shared/', '"shared/'), after])
    done = forkserver.run(["-c", program], timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_parses() -> None:
    found = every("sh")
    assert len(found) > 8
    for document, text in found:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{document}: {done.stderr}"


def test_commands_have_the_options_that_they_are_given() -> None:
    """Each command is parsed as the command line does, without running it."""
    found = [
        (document, match[1])
        for language, pattern in COMMANDS.items()
        for document, text in every(language)
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]
    assert len(found) > 30
    for document, line in found:
        words = shlex.split(line.split(";")[0].split(" > ")[0], comments=True)[1:]
        context = click.Context(cli, info_name="scarctl", **cli.context_settings)
        command: click.Command = cli
        while isinstance(command, click.Group):
            inner = command.get_command(context, words[0]) if words else None
            assert inner is not None, f"{document}: {line}"
            command, words = inner, words[1:]
        try:
            command.make_context(command.name, words, parent=context)
        except click.UsageError as error:
            pytest.fail(f"{document}: {line}\n{error.format_message()}")

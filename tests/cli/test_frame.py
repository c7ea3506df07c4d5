"""Test what all commands share: help, options from all sources, errors as text and JSON, exit codes of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import click
import pytest

from scarctl.cli.main import COMMANDS, GROUPS, cli, default_map
from scarctl.cli.output import Terminated, signals
from scarctl.config import (
    KNOWN_NAMES,
    VERBS,
    brief,
    describe,
)

SCARCTL = [sys.executable, "-m", "scarctl"]


def commands() -> dict[str, click.Command]:
    """Return all commands that do something, by the words that call them: "verify", "live checkpoint"."""
    context, found = click.Context(cli), {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            assert sorted(command.commands) == sorted(GROUPS[name])
            found |= {f"{name} {part}": leaf for part, leaf in command.commands.items()}
        else:
            assert name not in GROUPS
            found[name] = command
    return found


def options(command: click.Command) -> dict[str, click.Option]:
    """Return options by their names on the command line, with underscores."""
    found = [option for option in command.params if isinstance(option, click.Option)]
    return {max(o.opts, key=len).removeprefix("--").replace("-", "_"): o for o in found}


def test_help_lists_every_command(run) -> None:  # type: ignore[no-untyped-def]
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS)
    assert "Exit codes" in run("help").stdout
    assert run("--version").stdout.startswith("scarctl, version ")
    for words, command in commands().items():
        cut = " " in words and "..." in command.get_short_help_str(70)
        assert not cut, f"the help of {words} is cut off in the list of commands"


SETTINGS = [
    "arena_dir", "assume_single_writer", "bandwidth", "convergence", "debug", "dry_run", "duration",
    "deadline", "every", "format", "fraction", "from", "gain", "hosts", "json", "keep_every", "keep_last", "limit",
    "max_rework", "max_shard_size", "memory_bandwidth", "metrics", "metrics_listen",
    "mode", "mtbf", "overhead", "partition_bytes", "peer", "peer_tls", "peers", "policy",
    "read_data", "read_data_subset", "restart", "restarts", "rounds", "shards", "state_bytes", "step",
    "step_time", "steps", "store", "timeout", "to", "watch",
]  # fmt: skip
"""Options that may come from the environment. An option not listed here orders an action."""


def test_no_environment_variable_is_a_verb() -> None:
    for words, command in commands().items():
        for name, option in options(command).items():
            if words == "simulate":
                own = name not in ("json", "debug")
                assert option.envvar == f"SCARCTL_{'SIMULATE_' if own else ''}{name.upper()}"
            elif name == "timeout":  # its meaning differs between commands
                assert option.envvar == f"SCARCTL_{words.split()[0].upper()}_TIMEOUT", words
            elif name in SETTINGS:
                assert option.envvar == f"SCARCTL_{name.upper()}", (words, name)
            else:
                assert name in VERBS, (
                    f"{words} has --{name}: list it as a setting here, or as a verb in config.VERBS"
                )
                assert option.envvar is None, (words, name)
                assert (
                    not option.allow_from_autoenv
                    or command.context_settings.get("auto_envvar_prefix") is None
                )


def test_what_the_environment_says_for_verbs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in VERBS:
        monkeypatch.setenv(f"SCARCTL_{verb.upper()}", "1")
        for name in COMMANDS:
            monkeypatch.setenv(f"SCARCTL_{name.upper()}_{verb.upper()}", "1")
    for words, command in commands().items():
        if words == "simulate":
            continue
        context = click.Context(command, info_name=words)
        for name, option in options(command).items():
            if name in VERBS:
                assert option.value_from_envvar(context) is None, (words, name)


def test_options_that_are_settings_are_described_by_their_classes() -> None:
    texts = {name: describe(name) for name in KNOWN_NAMES}
    assert all(text.endswith(".") for text in texts.values())
    for name in ("fraction", "shards", "partition_bytes", "assume_single_writer", "arena_dir", "store"):
        assert options(commands()["checkpoint"])[name].help == brief(name)
        assert brief(name).partition(". ")[0] == texts[name].partition(". ")[0]
    with pytest.raises(KeyError):
        describe("unheard_of")


def test_every_option_is_also_a_key_of_scarctl_toml(tmp_path: Path) -> None:
    for words, command in commands().items():
        name, _, part = words.partition(" ")
        keys = {
            flag: o.name for flag, o in options(command).items() if name == "simulate" or flag not in VERBS
        }
        lines = [f'{flag.replace("_", "-")} = "strange"\n' for flag in keys]
        (tmp_path / "scarctl.toml").write_text("".join([f"[{name}]\n", *lines]))
        context = click.Context(cli, default_map=default_map(tmp_path))
        cli.get_command(context, name)
        assert context.default_map is not None
        found = context.default_map[name][part] if part else context.default_map[name]
        assert found == dict.fromkeys(keys.values(), "strange")


def test_every_command_takes_json_and_debug() -> None:
    for words, command in commands().items():
        names = options(command)
        assert "debug" in names
        assert ("json" in names) == (words != "run"), "stdout is that of the command that it runs"
        assert ("store" in names) == (words not in ("diff", "plan", "rehearse", "simulate"))


def test_a_table_of_a_command_with_commands_holds_for_all_of_them(  # type: ignore[no-untyped-def]
    run, saved, tmp_path: Path
) -> None:
    (tmp_path / "scarctl.toml").write_text('store = "ckpt"\n[snapshot]\njson = true\ntimeout = 1\n')
    assert run("snapshot", "list").document == {
        "schema_version": 1,
        "command": "snapshot list",
        "snapshots": [],
    }
    (tmp_path / "scarctl.toml").write_text("[live]\nfull = true\n")
    done = run("live", "checkpoint", "--store", "ckpt", code=2)
    assert "'full', which is not a setting" in done.stderr


class TestErrors:
    def test_text_goes_to_stderr_with_a_hint(self, run) -> None:  # type: ignore[no-untyped-def]
        done = run("inspect", "--store", "nowhere", code=10)
        assert done.stdout == ""
        assert done.stderr.startswith("scarctl inspect: ")
        assert "nowhere" in done.stderr
        assert len(done.stderr.splitlines()) == 2

    def test_json_is_one_document_on_stdout(self, run) -> None:  # type: ignore[no-untyped-def]
        done = run("inspect", "--store", "nowhere", "--json", code=10)
        assert done.document["command"] == "inspect"
        assert done.error["kind"] == "no-store"
        assert done.stderr == ""

    @pytest.mark.parametrize(
        ("arguments", "command"),
        [
            (["inspect"], "inspect"),
            (["live", "checkpoint"], "live checkpoint"),
            (["snapshot", "unheard-of", "--store", "x"], "snapshot"),
            (["verify", "--store", "unheard-of://bucket/x"], "verify"),
            (["unheard-of"], None),
            ([], None),
        ],
    )
    def test_wrong_calls_are_usage_errors_in_json_too(
        self, run, arguments: list[str], command: str | None
    ) -> None:  # type: ignore[no-untyped-def]
        done = run(*arguments, "--json", code=2)
        assert done.document["command"] == command
        assert done.error["kind"] == "usage"
        assert run(*arguments, code=2).stdout == ""

    def test_the_unexpected_is_short_without_debug(self, run, monkeypatch: pytest.MonkeyPatch, saved) -> None:  # type: ignore[no-untyped-def]
        def broken(*_: object) -> None:
            raise ZeroDivisionError("seven")

        monkeypatch.setattr("scarctl.ops.survey.survey", broken)
        done = run("inspect", "--store", "ckpt", code=1)
        assert "ZeroDivisionError: seven" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Traceback" in run("inspect", "--store", "ckpt", "--debug", code=1).stderr
        monkeypatch.setenv("SCARCTL_DEBUG", "1")
        done = run("inspect", "--store", "ckpt", "--json", code=1)
        assert "Traceback" in done.stderr
        assert done.error["kind"] == "unexpected"


class TestWhereValuesComeFrom:
    def test_command_line_before_environment_before_file_before_default(  # type: ignore[no-untyped-def]
        self, run, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def listed(*arguments: str) -> int:
            return len(run("inspect", "--json", *arguments).document["partitions"])

        toml = tmp_path / "scarctl.toml"
        toml.write_text('store = "ckpt"\njson = false\n')
        total = listed()
        assert total > 5
        toml.write_text('store = "ckpt"\n[inspect]\nlimit = 5\n')
        assert listed() == 5
        monkeypatch.setenv("SCARCTL_LIMIT", "4")
        assert listed() == 4
        assert listed("--limit", "3") == 3
        assert listed("--limit", "all") == total
        toml.write_text('store = "elsewhere"\n')
        monkeypatch.setenv("SCARCTL_STORE", "ckpt")
        assert listed() == 4

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("store = ", "not TOML"),
            ("\xff", "not TOML"),
            ("[unheard_of]\na = 1", "not a command"),
            ("fracton = 0.5", "neither a setting nor an option"),
            ('[inspect]\nlimt = 5\nstore = "x"', "not an option"),
            (f"a = {'1' * 5000}", "not TOML"),
            (f"a = {'[' * 5000}", "not TOML"),
        ],
    )
    def test_a_wrong_file_is_refused(self, run, tmp_path: Path, content: str, says: str) -> None:  # type: ignore[no-untyped-def]
        (tmp_path / "scarctl.toml").write_bytes(content.encode("latin-1"))
        assert says in run("inspect", "--json", code=2).error["message"]


class TestProcess:
    """Tests through a real process."""

    def test_a_reader_that_goes_away_is_no_noise(self, saved, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        read, write = os.pipe()
        os.close(read)
        command = [*SCARCTL, "inspect", "--store", "ckpt"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path)
        os.close(write)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")

    def test_a_signal_ends_it_with_its_number_and_leaves_no_temporary_file(  # type: ignore[no-untyped-def]
        self, saved, tmp_path: Path
    ) -> None:
        program = (
            "import sys, time\nfrom scarctl.cli.main import cli\n"
            "def slow(*a):\n    print('ready', flush=True)\n    time.sleep(60)\n"
            "import scarctl.ops.recover\nscarctl.recovery.shared_plan.execute_once = slow\ncli.main(sys.argv[1:])"
        )
        arguments = ["recover", "--store", "ckpt", "--lost", "all", "--output", "out.safetensors"]
        before = sorted(os.listdir(tmp_path))
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in err
        assert sorted(os.listdir(tmp_path)) == before


class Noted:
    """An object that can be referred to weakly."""


def meets_a_signal() -> None:
    """Get SIGTERM in a callback of a weak reference, like those at the end of an import, and go on."""
    noted = Noted()

    def arrives(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    reference = weakref.ref(noted, arrives)
    del noted
    assert reference() is None
    time.sleep(10)


def test_a_signal_ends_a_command_even_where_python_drops_its_exception() -> None:
    with pytest.raises(Terminated) as ended, signals():
        meets_a_signal()
    assert ended.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

"""Run the `scarctl` command: find the subcommand, name options' variables, and turn exceptions into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from scarctl import __version__
from scarctl.cli.groups import Group
from scarctl.cli.output import (
    EXIT_RUN_FAILED,
    EXIT_SIGNAL,
    logging_to_stderr,
    open_streams,
    plain_streams,
    report_error,
    signals,
)
from scarctl.config import KNOWN_NAMES, STORAGE_OPTIONS, VERBS, read_file, storage_options
from scarctl.config.environment import OF_EACH_COMMAND, warn_of_unread
from scarctl.errors import UsageError

# Listed here so that `scarctl --help` imports no command.
COMMANDS = {
    "checkpoint": "Save the part of a state file that changed most.",
    "daemon": "Start, show or stop the process that saves for all runs of a host.",
    "diff": "Compare two checkpoints of any kind, tensor by tensor.",
    "doctor": "Test a place for a store: its guarantees, and its speed.",
    "evacuate": "Save this host's memory before the host shuts down.",
    "export": "Write a state as safetensors, .pt or DCP, for other tools.",
    "inspect": "Show the content of a store, and the change if a shard is lost.",
    "live": "Have the session that runs on this host save or recover.",
    "plan": "Recommend how often to save how much, and whether that pays.",
    "prune": "Delete old copies and sealed states that need not be kept.",
    "recover": "Restore only the lost parts of a state.",
    "rehearse": "Kill a program, start it again, and compare, bit for bit.",
    "report": "Write a page about a store: safety, ages, recoveries.",
    "run": "Run a command whose sessions save through the host's daemon.",
    "simulate": "Fail runs of a workload, and count the iterations that costs.",
    "snapshot": "Create, list and delete whole states that are kept under a name.",
    "status": "Show problems, worst first, and what to do next.",
    "verify": "Check every record, segment and checksum of a store.",
}

ABOUT = {"help": "Show the help of a command.", "version": "Show the versions of scarctl and Python."}
"""Commands about scarctl. They take no settings."""

GROUPS = {"live": ("checkpoint", "recover"), "snapshot": ("create", "delete", "list")}
"""Commands that have commands of their own."""

# Options that are not settings of a session, and are allowed at the top of scarctl.toml.
OPTIONS = frozenset((
    "json", "deadline", "debug", "limit", "mode", "read_data", "read_data_subset", "dry_run", "restarts",
    "rounds", "steps", "keep_last", "keep_every", "max_rework", "max_shard_size",
))  # fmt: skip

_OF_STUDIES = frozenset({"simulate"})
"""Commands whose options differ in meaning from a run's of the same name (`interval`): only their own table counts,
and their variables have the command's name too (SCARCTL_SIMULATE_INTERVAL)."""
_OF_ALL = frozenset({"json", "debug"})
"""Options that mean the same in every command."""

EPILOG = """\
\b
Examples:
  scarctl checkpoint model.safetensors --store ckpt --step 100
  scarctl inspect --store ckpt
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors
  scarctl verify --store ckpt
  scarctl prune --store ckpt --dry-run
  scarctl snapshot list --store ckpt
  scarctl run --store ckpt -- python train.py

\b
Every setting is also an environment variable (--store is SCARCTL_STORE) and a key of scarctl.toml in the
current folder: a table per command, or at the top for all. --timeout has the command's name (SCARCTL_RUN_TIMEOUT)
and counts in its table only. Command line > environment > file. Options that say what to do are given on the
command line only: --lost, --into, --output, --snapshot, --full, --keep, --ignore, --atol, --yes, ... A variable
that has no effect is named in a warning. A scarctl.toml that others may write is ignored.

\b
Exit codes:
  0 ok  1 error  2 usage  3 partly done  4 different  5 not deterministic  10 no store  11 contention
  12 access denied  13 corruption  14 store lacks a guarantee  15 fenced  16 no intact copy
  17 store unavailable  128+N ended by signal N
"""


class LazyGroup(Group):
    """A group that imports a command when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS | ABOUT)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ABOUT:
            from scarctl.cli import about

            return about.version if cmd_name == "version" else about.help_
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"scarctl.cli.{cmd_name}").command
        leaves = command.commands if isinstance(command, click.Group) else {"": command}
        for leaf in leaves.values():
            _name_variables(leaf, cmd_name)
        # A file has the names of the command line; click knows options by the names of the function's arguments.
        names = {
            part: {_key(word): parameter.name for parameter in leaf.params for word in parameter.opts}
            for part, leaf in leaves.items()
        }
        given = (ctx.default_map or {}).get(cmd_name, {})
        for key in given:
            if cmd_name not in _OF_STUDIES:
                _refuse_verb(key)
            if key not in KNOWN_NAMES | OPTIONS and not any(key in known for known in names.values()):
                raise UsageError(
                    f"scarctl.toml: [{cmd_name}] has {key!r}, which is not an option of this command"
                )
        defaults = {
            part: {known.get(key, key): value for key, value in given.items()}
            for part, known in names.items()
        }
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults.get("", defaults)}
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted((COMMANDS | ABOUT).items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write((self.epilog or "").replace("\b\n", ""))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and exit with its code."""
        arguments = list(sys.argv[1:] if args is None else args)
        prog_name = prog_name or "scarctl"
        self._main_shell_completion(extra, prog_name, complete_var)
        open_streams()
        plain_streams()
        try:
            with signals(), logging_to_stderr():
                warn_of_unread(os.environ)
                extra.setdefault("default_map", default_map(Path()))
                with self.make_context(prog_name, arguments[:], **extra) as context:
                    code = self.invoke(context)
                sys.stdout.flush()
        except click.exceptions.Exit as end:
            code = end.exit_code
        except SystemExit:
            raise
        except BaseException as error:  # the end of the process: every error is reported, none swallowed
            command = _command_of(arguments)
            code = report_error(
                error,
                command=command,
                as_json=_asked(arguments, "--json", "SCARCTL_JSON") and command != "run",
                debug=_asked(arguments, "--debug", "SCARCTL_DEBUG"),
            )
            if command == "run" and code < EXIT_SIGNAL:
                code = EXIT_RUN_FAILED  # its other exit codes are those of the command that it runs
        sys.exit(code or 0)


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="scarctl")
def cli() -> None:
    """Checkpoint the part of a training state that changed most; restore only what was lost."""


def main() -> NoReturn:
    """Entry point of the `scarctl` script."""
    cli.main()


def default_map(folder: Path) -> dict[str, dict[str, Any]]:
    """Return defaults from `scarctl.toml`: keys at the top hold for every command, a table `[recover]` for that one.

    Raises UsageError for a table that belongs to no command and for an unknown key at the top.
    """
    content = read_file(folder)
    storage_options(content)  # only a check: they are read when a store is opened
    content.pop(STORAGE_OPTIONS, None)
    tables = {key: value for key, value in content.items() if isinstance(value, dict) and key != "rows"}
    for name in tables:
        if name not in COMMANDS:
            raise UsageError(
                f"scarctl.toml has a table [{name}], which is not a command",
                hint=f"commands: {', '.join(COMMANDS)}",
            )
    shared = _options({key: value for key, value in content.items() if key not in tables})
    for key in shared:
        _refuse_verb(key)
        if key not in KNOWN_NAMES and key not in OPTIONS:
            raise UsageError(f"scarctl.toml has {key!r}, which is neither a setting nor an option")
    shared = {key: value for key, value in shared.items() if key not in OF_EACH_COMMAND}
    return {
        name: ({} if name in _OF_STUDIES else shared) | _options(tables.get(name, {})) for name in COMMANDS
    }


def _refuse_verb(key: str) -> None:
    if key in VERBS:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(
            f"scarctl.toml has {key!r}, which is not a setting", hint=f"give {option} on the command line"
        )


def _name_variables(command: click.Command, name: str) -> None:
    """Give every option but the verbs its environment variable: --arena-dir is SCARCTL_ARENA_DIR."""
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        key = _key(max(option.opts, key=len))
        if key in OF_EACH_COMMAND or (name in _OF_STUDIES and key not in _OF_ALL):
            option.envvar = f"SCARCTL_{name}_{key}".upper()
        elif key not in VERBS:
            option.envvar = f"SCARCTL_{key.upper()}"


def _command_of(arguments: Sequence[str]) -> str | None:
    """Return the command's name, read without the parser: the error may be the parser's own.

    It comes first, because scarctl itself has no options that precede a command.
    """
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return None
    part = next((word for word in arguments[1:] if word in GROUPS.get(name, ())), None)
    return name if part is None else f"{name} {part}"


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {_key(name): value for name, value in table.items()}


def _key(option: str) -> str:
    """Return an option's key in `scarctl.toml`, where dashes are allowed too: --dry-run -> dry_run."""
    return option.lstrip("-").replace("-", "_")


def _asked(arguments: Sequence[str], flag: str, variable: str) -> bool:
    """Return whether a flag was given, read without the parser: the error may be the parser's own."""
    given = list(arguments)
    if "--" in given:
        given = given[: given.index("--")]
    return flag in given or os.environ.get(variable, "").strip().lower() in (
        "1",
        "true",
        "t",
        "yes",
        "y",
        "on",
    )

"""The `scarctl` command: finds the subcommand, and is the one place where exceptions become exit codes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from scarctl import __version__
from scarctl.cli.output import EXIT_RUN_FAILED, EXIT_SIGNAL, logging_to_stderr, report_error, signals
from scarctl.config import KNOWN_NAMES, STORAGE_OPTIONS, VERBS, read_file, storage_options
from scarctl.errors import UsageError

log = logging.getLogger("scarctl")

# What `scarctl --help` shows stands here, so that it imports no command.
COMMANDS = {
    "checkpoint": "Save the part of a state file that changed most.",
    "daemon": "Start, look at or stop the process that makes checkpoints durable.",
    "doctor": "Try out a place for a store: what it guarantees, and how fast it is.",
    "export": "Write a state as safetensors, .pt or DCP, for other tools.",
    "inspect": "Show what a store holds and what losing a shard would change.",
    "plan": "Recommend how often to save how much, and say whether that pays.",
    "prune": "Delete old copies, sealed states and snapshots that need not be kept.",
    "recover": "Restore only what was lost.",
    "run": "Run a command whose sessions save through the host's daemon.",
    "simulate": "Fail runs of a workload, and show how many iterations it costs.",
    "verify": "Check every record, segment and checksum of a store.",
}

# Options that are no settings of a session and may still stand at the top of scarctl.toml.
OPTIONS = frozenset(
    {
        "json",
        "debug",
        "limit",
        "mode",
        "read_data",
        "read_data_subset",
        "dry_run",
        "timeout",
        "restarts",
        "wait",
        "rounds",
        "keep_last",
        "keep_every",
        "max_rework",
        "max_shard_size",
    }
)

_OF_STUDIES = frozenset({"simulate"})
"""Commands whose options mean something else than a run's of the same name (`interval`): only their table counts, and
their variables have the command's name too (SCARCTL_SIMULATE_INTERVAL)."""

EPILOG = """\
\b
Examples:
  scarctl checkpoint model.safetensors --store ckpt --step 100
  scarctl inspect --store ckpt
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors
  scarctl verify --store ckpt
  scarctl prune --store ckpt --dry-run
  scarctl run --store ckpt -- python train.py

\b
Every setting is also an environment variable (--store is SCARCTL_STORE) and a key of scarctl.toml in the
current folder: a table per command, or at the top for all. Command line > environment > file. What says what
to do is given on the command line only: --lost, --into, --output, --snapshot, --live, --full, --keep,
--delete, --no-writer, --yes, --reap. A scarctl.toml that others may write is ignored.

\b
Exit codes:
  0 ok  1 error  2 usage  3 partly done  10 no store  11 contention  12 access denied  13 corruption
  14 store lacks a guarantee  15 fenced  16 no intact copy  17 store unavailable  128+N ended by signal N
"""


class LazyGroup(click.Group):
    """A group that imports a command when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"scarctl.cli.{cmd_name}").command
        # As they are written on the command line: click knows them by the names of the function's arguments.
        names = {_key(word): parameter.name for parameter in command.params for word in parameter.opts}
        defaults = ctx.default_map or {}
        for key in defaults.get(cmd_name, ()):
            if cmd_name not in _OF_STUDIES:
                _refuse_verb(key)
            if key not in KNOWN_NAMES | OPTIONS | names.keys():
                raise UsageError(f"scarctl.toml: [{cmd_name}] has {key!r}, which is no option of it")
        ctx.default_map = {
            **defaults,
            cmd_name: {names.get(key, key): value for key, value in defaults.get(cmd_name, {}).items()},
        }
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write(EPILOG.replace("\b\n", ""))

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
        try:
            with signals(), logging_to_stderr():
                _warn_of_verbs()
                extra.setdefault("default_map", default_map(Path()))
                with self.make_context(prog_name, arguments[:], **extra) as context:
                    code = self.invoke(context)
                sys.stdout.flush()
        except click.exceptions.Exit as end:
            code = end.exit_code
        except SystemExit:
            raise
        except (
            BaseException
        ) as error:  # this is the end of the process: everything is told, nothing swallowed
            command = next((a for a in arguments if a in COMMANDS), None)
            code = report_error(
                error,
                command=command,
                as_json=_asked(arguments, "--json", "SCARCTL_JSON") and command != "run",
                debug=_asked(arguments, "--debug", "SCARCTL_DEBUG"),
            )
            if command == "run" and code < EXIT_SIGNAL:
                code = EXIT_RUN_FAILED  # all others are those of the command that it runs
        sys.exit(code or 0)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="scarctl")
def cli() -> None:
    """Checkpoint the part of a training state that changed most; restore only what was lost."""


def main() -> NoReturn:
    """Entry point of the `scarctl` script."""
    cli.main()


def default_map(folder: Path) -> dict[str, dict[str, Any]]:
    """Defaults from `scarctl.toml`: keys at the top hold for every command, a table `[recover]` for that one.

    Raises UsageError for a table that is not a command's and for a key at the top that nothing knows.
    """
    content = read_file(folder)
    storage_options(content)  # checked here, read where a store is opened
    content.pop(STORAGE_OPTIONS, None)
    tables = {key: value for key, value in content.items() if isinstance(value, dict) and key != "rows"}
    for name in tables:
        if name not in COMMANDS:
            raise UsageError(
                f"scarctl.toml has a table [{name}], which is no command",
                hint=f"commands: {', '.join(COMMANDS)}",
            )
    shared = _options({key: value for key, value in content.items() if key not in tables})
    for key in shared:
        _refuse_verb(key)
        if key not in KNOWN_NAMES and key not in OPTIONS:
            raise UsageError(f"scarctl.toml has {key!r}, which is no setting and no option")
    return {
        name: ({} if name in _OF_STUDIES else shared) | _options(tables.get(name, {})) for name in COMMANDS
    }


def _refuse_verb(key: str) -> None:
    if key in VERBS:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(
            f"scarctl.toml has {key!r}, which is no setting", hint=f"say {option} on the command line"
        )


def _warn_of_verbs() -> None:
    """What was an environment variable once, and is said on the command line now."""
    for key in sorted(VERBS):
        if os.environ.get(f"SCARCTL_{key.upper()}"):
            option = f"--{key.replace('_', '-')}"
            log.warning("SCARCTL_%s has no effect: say %s on the command line", key.upper(), option)


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {_key(name): value for name, value in table.items()}


def _key(option: str) -> str:
    """An option's key in `scarctl.toml`, which may as well have dashes: --dry-run -> dry_run."""
    return option.lstrip("-").replace("-", "_")


def _asked(arguments: Sequence[str], flag: str, variable: str) -> bool:
    """Whether a flag was given, read without the parser: the error may be the parser's own."""
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

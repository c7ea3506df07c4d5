"""Share options, output and exit codes among all commands.

With `--json` exactly one document goes to stdout, also if the command fails:
`{"schema_version": 1, "command": ..., "error": {"kind", "message", "hint", "exit_code"}}`.
"""

from __future__ import annotations

import errno
import functools
import io
import json
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from scarctl.cli.completion import complete_store
from scarctl.cli.given import required_store
from scarctl.config import brief, read_file, storage_options
from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.util.text import printable, printable_lines

if TYPE_CHECKING:
    from scarctl.state.label import Label
    from scarctl.store import Store

SCHEMA_VERSION = 1
EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_PARTLY = 3
EXIT_DIFFERENT = 4
EXIT_NOT_DETERMINISTIC = 5
EXIT_CORRUPT = 13
EXIT_NO_GUARANTEE = 14
EXIT_RUN_FAILED = 125
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXIT_SIGNAL = 128
"""Base of exit codes for signals: add the signal's number."""
_AGAIN = 0.05
"""Seconds after which a signal whose exception was dropped is sent again."""
_JSON = "scarctl.json"
"""Key of `--json` in the context of a command."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Terminated(BaseException):
    """A signal asked the process to end. Not an Exception, so that only cleanup runs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Seconds(click.FloatRange):
    """A duration: a finite number of seconds, `at_least` or more."""

    name = "seconds"

    def __init__(self, at_least: float = 0.0) -> None:
        super().__init__(min=at_least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number of seconds.", param, ctx)
        return number


def common_options(command: Decorated) -> Decorated:
    """Add the options of a command on a store whose arguments are something else: `--store`, `--json`, `--debug`."""
    return store_option(required=True)(output_options(command))


def on_store(command: Callable[..., int]) -> Callable[..., int]:
    """Add STORE or `--store`, `--json` and `--debug` to a command, which gets `store`. Raises UsageError without it."""

    @functools.wraps(command)
    def named(place: str | None, store: str | None, **options: Any) -> int:
        return command(store=required_store(place, store), **options)

    return store_argument(output_options(named))


def store_option(
    name: str = "--store", *, required: bool = False, about: str = ""
) -> Callable[[Decorated], Decorated]:
    """Add `--store`, or an option like it. A shell completes it with folders that hold a store."""
    return click.option(
        *name.split(),
        required=required,
        metavar="URL",
        help=about or brief("store"),
        shell_complete=complete_store,
    )


def store_argument(command: Decorated) -> Decorated:
    """Add the argument STORE as `place`, and `--store`: see `scarctl.cli.given.named_store`."""
    argument = click.argument("place", metavar="[STORE]", required=False, shell_complete=complete_store)
    return argument(store_option(about="The same as STORE.")(command))


def output_options(command: Decorated) -> Decorated:
    """Add `--json` and `--debug`, which are not parameters of the command: `emit` and `report_error` ask for them."""
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails."
    )
    json_ = click.option(
        "--json", is_flag=True, expose_value=False, callback=_note_json, help="Print one JSON document."
    )
    return json_(debug(command))


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[_JSON] = value


def wants_json() -> bool:
    """Return whether the current command prints a JSON document."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_JSON))


def arena_option(command: Decorated) -> Decorated:
    """Add `--arena-dir`."""
    return click.option("--arena-dir", metavar="DIR", help=brief("arena_dir"))(command)


def recovery_options(command: Decorated) -> Decorated:
    """Add `--lost` and `--max-rework`."""
    max_rework = click.option(
        "--max-rework",
        type=click.FloatRange(min=0),
        metavar="N",
        help="Refuse if the predicted cost exceeds N iterations or is unknown.",
    )
    lost = click.option(
        "--lost",
        required=True,
        multiple=True,
        metavar="SPEC",
        help="Lost shards (2,5), ranks (rank:1,3), members (member:2), names ('layers.3.*', 'emb.weight[0:512]'), or "
        "all; may be repeated. Among ranks or members, a number alone is one of them.",
    )
    return lost(max_rework(command))


def open_store(url: str) -> Store:
    """Open the store of `--store`. Raises NoStore, Corruption, AccessDenied, Unavailable."""
    from scarctl.store import Store

    return Store.open(url, storage_options=options_for(url))


def options_for(url: str) -> dict[str, Any] | None:
    """Return the storage options of `scarctl.toml` in the current folder; None if the store is a local folder.

    Raises UsageError.
    """
    local = "://" not in url or url.startswith("file:")
    return None if local else storage_options(read_file(Path()))


def shown_url(url: str) -> str:
    """Return `url` without parts that may be secret."""
    from scarctl.store.backends.address import Address

    return Address.parse(url).shown if "://" in url else url


def timeout_option(about: str, *, default: float = 60.0) -> Callable[[Decorated], Decorated]:
    """Add `--timeout`."""
    return click.option(
        "--timeout", type=Seconds(), default=default, show_default=True, metavar="SEC", help=about
    )


def emit(fields: Mapping[str, Any], text: str = "") -> None:
    """Write a command's result to stdout: with `--json` the document of `fields`, otherwise `text`."""
    if wants_json():
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": click.get_current_context().command_path.partition(" ")[2],
            **fields,
        }
        text = json.dumps(document, allow_nan=False)
    if text:
        say(printable_lines(text), err=False)


def say(text: str, *, err: bool = True) -> None:
    """Write lines to stderr, or stdout. Characters that its encoding cannot represent are escaped.

    click would write UTF-8 to a terminal that takes ASCII only.
    """
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo((text + "\n").encode(encoding, "backslashreplace"), err=err, nl=False)


def open_streams() -> None:
    """Open the standard streams that the caller has closed: nothing can be read there, and what is written is lost.

    Otherwise the next file would get a stream's number, and messages of libraries.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def plain_streams() -> None:
    """Escape characters that stdout and stderr cannot represent. With LC_ALL=C that is everything but ASCII.

    Python writes UTF-8 in the locale C, which a terminal that has asked for C may not show.
    """
    environ = os.environ
    ascii_only = environ.get("LC_ALL") in ("C", "POSIX") and not (
        environ.get("PYTHONIOENCODING") or environ.get("PYTHONUTF8")
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="ascii" if ascii_only else None, errors="backslashreplace")


def warn(message: str) -> None:
    """Write a warning to stderr."""
    say(f"scarctl: warning: {printable(message)}")


def note(message: str) -> None:
    """Write a message to stderr."""
    say(f"scarctl: {printable(message)}")


class _ToStderr(logging.Handler):
    """Show the library's log as messages of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"scarctl: {record.levelname.lower()}: {printable(record.getMessage())}")


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show the library's warnings on stderr."""
    logger, handler = logging.getLogger("scarctl"), _ToStderr(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def now_stored(label: Label) -> str:
    """Return the label of a checkpoint, after what was saved; "" unless the store has the whole state of its step."""
    return f"; the store has {label}" if label.of_one else ""


def in_iterations(amount: object) -> str:
    """Return an amount that is a number, or a number with an interval, in iterations: "1 iteration"."""
    return f"{amount} iteration{'' if str(amount) == '1' else 's'}"


@contextmanager
def signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `Terminated`, so that temporary files are removed. Main thread only.

    Python drops an exception within some callbacks, as at the end of an import. The signal is then sent once more.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if isinstance(what.exc_value, Terminated):
            threading.Timer(_AGAIN, os.kill, (os.getpid(), what.exc_value.number)).start()
        else:
            before(what)

    previous, before = {}, sys.unraisablehook
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # nohup's SIG_IGN stays.
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, end)
    except ValueError:
        pass  # not the main thread: the process's owner handles its signals
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an exception that ended a command."""
    if isinstance(error, ScarError):
        return error.exit_code
    if isinstance(error, Terminated):
        return EXIT_SIGNAL + error.number
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return EXIT_SIGNAL + signal.SIGINT
    if isinstance(error, BrokenPipeError):
        return EXIT_SIGNAL + signal.SIGPIPE
    if isinstance(error, click.ClickException):
        return EXIT_USAGE
    return EXIT_ERROR


def report_error(error: BaseException, *, command: str | None, as_json: bool, debug: bool) -> int:
    """Report an exception that ended a command, and return its exit code."""
    if _is_full(error):
        assert isinstance(error, OSError)
        _drop_stdout()  # it would fail at exit again
        error = Unavailable(
            f"the output cannot be written: {error.strerror}",
            hint="free space, and look at the result with another command: the work itself may be done",
        ).with_traceback(error.__traceback__)
        as_json = False
    elif _has_no_folder(error):
        error = UsageError(
            "the current folder no longer exists", hint="change to one that does, or give absolute paths"
        ).with_traceback(error.__traceback__)
    code = exit_code_of(error)
    if isinstance(error, BrokenPipeError):
        _drop_stdout()
        return code
    kind, message, hint = _brief(error)
    if debug:
        say(printable_lines("".join(traceback.format_exception(error)).rstrip("\n")))
    if as_json:
        fields = {"kind": kind, "message": message, "hint": hint, "exit_code": code}
        document = {"schema_version": SCHEMA_VERSION, "command": command, "error": fields}
        try:
            click.echo(json.dumps(document, ensure_ascii=True))
        except OSError as unwritten:
            _drop_stdout()
            if not isinstance(unwritten, BrokenPipeError):
                say(printable(f"scarctl {command}: {message}"))
    elif isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(printable_lines(message))
    else:
        say(f"{' '.join(filter(None, ['scarctl', command]))}: {printable_lines(message)}")
        if hint:
            say(f"  {hint}")
    return code


def error_fields(error: ScarError) -> dict[str, Any]:
    """Return an error's fields in a JSON document."""
    return {"kind": error.kind, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _brief(error: BaseException) -> tuple[str, str, str]:
    """Return (kind, message, hint) of an exception."""
    if isinstance(error, ScarError):
        return error.kind, error.message, error.hint
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"see `{context.command_path} --help`" if context else "see `scarctl --help`"
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            return "usage", error.format_message(), hint
        return "usage", " ".join(error.format_message().split()), hint
    if isinstance(error, Terminated):
        return (
            "signal",
            f"ended by {signal.Signals(error.number).name}",
            "no acknowledged checkpoint is lost",
        )
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "signal", "interrupted", "no acknowledged checkpoint is lost"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "no-torch", "this needs torch, which is not installed", "pip install torch"
    detail = str(error) or "no message"
    return "unexpected", f"unexpected {type(error).__name__}: {detail}", "run again with --debug to see where"


def _is_full(error: BaseException) -> bool:
    """Return whether stdout could not be written. Errors of other files have their name, or are ScarErrors."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _FULL


def _has_no_folder(error: BaseException) -> bool:
    """Return whether a relative path had no meaning, because the current folder was deleted."""
    if not isinstance(error, FileNotFoundError) or error.filename is not None:
        return False
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _drop_stdout() -> None:
    """Redirect stdout to nothing. Its reader is gone or its disk is full, and flushing it at exit would fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return  # stdout is not a file, so nothing is flushed into the pipe

"""Refuse options that would have no effect in the given combination."""

from __future__ import annotations

import click

from scarctl.errors import UsageError


def was_given(name: str) -> bool:
    """Return whether an option is on the command line. Environment and file give it to all commands, and do not count.

    name: of the function's argument.
    """
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def named_store(place: str | None, store: str | None) -> str | None:
    """Return the store that the argument STORE or `--store` names; None if neither does. Raises UsageError."""
    if place is not None:
        refuse("store", why="is given twice", hint="name the store once")
    if place == "":
        raise UsageError("the store is empty", hint="name a folder, or a URL")
    return place or store


def required_store(place: str | None, store: str | None) -> str:
    """Return `named_store`. Raises UsageError if no store is named."""
    wanted = named_store(place, store)
    if wanted is None:
        command = click.get_current_context().command_path
        raise UsageError("Missing argument 'STORE'.", hint=f"name a store: `{command} ckpt`")
    return wanted


def chosen_store(store: str | None, *, everything: bool) -> str | None:
    """Return `--store`; None with `--all`, which is needed to act on every run. Raises UsageError."""
    if everything and was_given("store"):
        raise UsageError("--all acts on every run, --store on those of one store", hint="give one of them")
    return None if everything else store


def refuse(*names: str, why: str, hint: str = "") -> None:
    """Raise UsageError for each of the options that is on the command line: "--every requires --watch"."""
    parameters = {parameter.name: parameter for parameter in click.get_current_context().command.params}
    for name in names:
        if was_given(name):
            raise UsageError(f"{max(parameters[name].opts, key=len)} {why}", hint=hint)

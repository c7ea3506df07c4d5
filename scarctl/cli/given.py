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


def refuse(*names: str, why: str, hint: str = "") -> None:
    """Raise UsageError for those of the options that are on the command line: "--every goes with --watch"."""
    parameters = {parameter.name: parameter for parameter in click.get_current_context().command.params}
    for name in names:
        if was_given(name):
            raise UsageError(f"{max(parameters[name].opts, key=len)} {why}", hint=hint)

"""A command line from its arguments to the exit status: errors of penstock, and the end of the output."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from penstock.cli import plain_lines
from penstock.cli.output import exit_status, print_error, set_json_errors
from penstock.errors import PenstockError

__all__ = ["run"]

_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


def run(args: Sequence[str], with_typer: Callable[[Sequence[str]], int]) -> int:
    """Run a command line; returns the exit status, see :func:`penstock.cli.main.main`.

    ``with_typer`` calls the command of a line that is not plain.
    """
    _prepare_streams()
    set_json_errors(enabled=_asks_for_json(args))
    try:
        status = _call(args, with_typer)
        sys.stdout.flush()  # also after an error: a failure here would otherwise be one of the interpreter
    except BrokenPipeError:
        _forget_output()
        return 1
    except OSError as error:
        if error.errno in _NO_ROOM:
            _forget_output()
            hint = "free disk space and run it again"
            print_error(PenstockError("the output could not be written", why=error.strerror, hint=hint))
        elif error.filename is not None:
            print_error(_unusable(_text(error.filename), error))
        elif _has_no_directory():
            print_error(PenstockError("the working directory was removed", hint="change to a directory that exists"))
        else:
            raise
        return 1
    return status


def _prepare_streams() -> None:
    """Replace closed standard streams, and escape characters that the locale's encoding lacks.

    A stream is closed as after ``<&-``; a file that is opened would otherwise have its descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - until the process ends
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _has_no_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - no path is needed
    except FileNotFoundError:
        return True
    return False


def _unusable(path: str, error: OSError) -> PenstockError:
    hint = None
    if isinstance(error, PermissionError):
        from penstock.runtime.io.permissions import permission_hint

        hint = permission_hint(Path(path))
    return PenstockError(f"{path} cannot be used", why=error.strerror, hint=hint)


def _text(filename: object) -> str:
    return os.fsdecode(filename) if isinstance(filename, str | bytes) else str(filename)


def _call(args: Sequence[str], with_typer: Callable[[Sequence[str]], int]) -> int:
    """Call the command, and print the errors of penstock."""
    try:
        plain = plain_lines.read(args, os.environ)
        return with_typer(args) if plain is None else plain()
    except KeyboardInterrupt:
        return 130
    except PenstockError as error:
        print_error(error)
        return exit_status(error)


def _asks_for_json(args: Sequence[str]) -> bool:
    """Whether a command has the option ``--json``; what follows ``--`` belongs to another program."""
    end = args.index("--") if "--" in args else len(args)
    return "--json" in args[:end]


def _forget_output() -> None:
    """Discard the buffer of standard output, whose flush at exit would fail again with status 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""Commands with ``--watch``: what they show, again and again, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, TypeVar

import typer

from penstock.cli.output import print_error
from penstock.errors import ConfigError, PenstockError

__all__ = ["Watch", "watched"]

T = TypeVar("T")

Watch = Annotated[
    float | None, typer.Option(help="Again every so many seconds, until Ctrl-C.", min=0.1, metavar="SECONDS")
]


def watched(look: Callable[[], T], show: Callable[[T], None], every_s: float | None, *, as_json: bool) -> None:
    """Show what ``look`` finds: once, or with ``every_s`` until Ctrl-C; then for people under the time of day.

    While watching, what fails is said on standard error, and asked again.

    Raises:
        ConfigError: the command cannot work at any time.
        PenstockError: it failed, and nobody watches.
    """
    if every_s is None:
        show(look())
        return
    between = ""
    try:
        while True:
            try:
                found = look()
            except ConfigError:
                raise
            except PenstockError as error:
                print_error(error)
            else:
                if not as_json:
                    sys.stdout.write(f"{between}{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}\n")
                    sys.stdout.flush()
                    between = "\n"
                show(found)
            time.sleep(every_s)
    except KeyboardInterrupt:
        return

"""Run a command in this process: exit status, standard output, standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.cli.main import main


class Done(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Done]


class Stdin:
    """Standard input with ``data``, or a terminal where there is none."""

    def __init__(self, data: bytes | None) -> None:
        self.buffer = io.BytesIO(data or b"")
        self._terminal = data is None

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in ("PENSTOCK_BROKER", "PENSTOCK_TUBE_MASTER", "PENSTOCK_HTTP"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str, stdin: bytes | None = None) -> Done:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        status = main(args)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run

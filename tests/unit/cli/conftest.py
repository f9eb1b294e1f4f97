"""Run a command in this process: exit status, standard output, standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from penstock.cli.context_file import FIELDS
from penstock.cli.main import main
from penstock.tube import reader
from penstock.tube.client import web as tube_web
from penstock.tube.client.web import WebLogin
from penstock.tube.reader import PartitionInfo


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

    def readline(self) -> str:
        return self.buffer.readline().decode()


@pytest.fixture
def penstock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    """Commands without the variables and contexts of the user who runs the tests."""
    for name in ("PENSTOCK_CONTEXT", *FIELDS.values(), "PENSTOCK_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))

    def run(*args: str, stdin: bytes | None = None) -> Done:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        status = main(args)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of ``--watch``, none of which takes any time; in each second one the user presses Ctrl-C."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.options.time.sleep", sleep)
    return found


class Web:
    """Administrations that answer ``rows``, or by method what ``answers`` or (by address, too) ``by_address`` holds."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self.logins: list[WebLogin] = []
        self.rows: list[dict[str, Any]] = []
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.by_address: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def call(
        self, address: str, method: str, parameters: Mapping[str, str], *, login: WebLogin, timeout_s: float = 10.0
    ) -> list[dict[str, Any]]:
        assert timeout_s > 0
        self.calls.append((address, method, dict(parameters)))
        self.logins.append(login)
        if method in self.by_address:
            return self.by_address[method][address]
        return self.answers.get(method, self.rows)


BROKER = {"brokerId": 1, "brokerIp": "127.0.0.1", "brokerPort": 8123, "runStatus": "running", "subStatus": "idle",
          "manageStatus": "online"}  # fmt: skip


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    web = Web()
    monkeypatch.setattr(tube_web, "call", web.call)
    monkeypatch.setattr(tube_web, "call_broker", web.call)
    return web


@pytest.fixture
def _master(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that announces the topic `water`."""

    def partitions(masters: str, topic: str, **_: object) -> list[PartitionInfo]:
        assert masters == "127.0.0.1:8715"
        return [PartitionInfo(1, "127.0.0.1", 8123, n) for n in (0, 1)] if topic == "water" else []

    monkeypatch.setattr(reader, "partitions", partitions)

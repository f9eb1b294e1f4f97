"""Log lines: one event each, fields readable by people and by machines, nothing that a peer could forge."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.runtime.observability.logs import LogFormat, LogLevel, LogLimiter, configure


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_text_lines_carry_event_and_fields(stream: io.StringIO) -> None:
    configure(stream=stream)
    logging.getLogger("penstock.mqtt").info("client connected", extra={"fields": {"client_id": "a b", "port": 1}})
    line = stream.getvalue()
    assert line.endswith('Z info    mqtt: client connected client_id="a b" port=1\n')
    assert line.count("\n") == 1


def test_text_of_peers_cannot_forge_a_line_or_move_the_cursor(stream: io.StringIO) -> None:
    configure(stream=stream)
    log = logging.getLogger("penstock.x")
    log.warning("odd %s", "a\x1b[2Jb", extra={"fields": {"topic": "t\n2026 error forged"}})
    assert stream.getvalue().endswith('x: odd a\\x1b[2Jb topic="t\\n2026 error forged"\n')


def test_json_lines_parse(stream: io.StringIO) -> None:
    configure(LogLevel.DEBUG, LogFormat.JSON, stream)
    log = logging.getLogger("penstock.node")
    log.debug("started", extra={"fields": {"pid": 7, "event": "not replaced"}})
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["part"], first["event"], first["pid"]) == ("debug", "node", "started", 7)
    assert second["traceback"].startswith("Traceback")


def test_levels_hold_and_configuring_again_replaces(stream: io.StringIO) -> None:
    configure(LogLevel.ERROR, stream=io.StringIO())
    configure(LogLevel.WARNING, stream=stream)
    logging.getLogger("penstock.a").info("not shown")
    logging.getLogger("uvicorn.error").info("not shown")
    logging.getLogger("penstock.a").warning("one\ntwo")
    assert stream.getvalue().splitlines()[0].endswith("a: one")
    assert stream.getvalue().splitlines()[1] == "  two"
    assert stream.getvalue().count("\n") == 2


def test_a_rate_limited_line_reports_its_count() -> None:
    limiter = LogLimiter(interval_ms=10_000)
    assert [limiter.admit(now) for now in (5, 6, 10_004)] == [1, 0, 0]
    assert limiter.admit(10_005, 3) == 5
    assert limiter.admit(40_000) == 1

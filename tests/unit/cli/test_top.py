"""`penstock top`: keys change the view, and each view fits into 80 columns and 24 lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.cli.top import VIEWS, NodeData, Screen, draw, keys_of
from penstock.errors import UnavailableError

OVERVIEW: dict[str, Any] = {
    "node": {"version": "0.1.0", "uptime_s": 4000.0},
    "load": {"cpu": 0.25, "memory_bytes": 90 << 20, "loop_delay_s": 0.002},
    "health": {
        "ready": True,
        "state": "ready",
        "reasons": [{"severity": "warning", "part": "disk", "what": "1 GB is left"}] * 2,
    },
    "hops": [
        {"title": "MQTT publishers", "rate": 1234.0, "unit": "messages", "total": 123456789, "lag_records": None,
         "lag_s": None, "lag_exact": True, "errors": 0},
        {"title": "Consumer groups", "rate": 0.5, "unit": "records", "total": 5, "lag_records": 46480, "lag_s": 11000.0,
         "lag_exact": False, "errors": 0},
    ],
}  # fmt: skip
CLIENT = {"client_id": "meter-\x1b[31m1", "connected": False, "address": None, "queued": 10000, "inflight": 0,
          "subscriptions": 3, "limits": ["max_queued_messages"]}  # fmt: skip
TOPIC: dict[str, Any] = {
    "topic": "water",
    "rate": 3.25,
    "bytes": 5 << 20,
    "partitions": 3,
    "groups": 1,
    "lag_records": 12,
    "lag_s": 3.0,
}
GROUP = {"group": "[bold]lake", "state": "without members", "members": 0, "lag_records": 46480, "lag_s": 866.0,
         "lag_exact": True}  # fmt: skip
KEY = {"key": None, "key_base64": "cmF3/w==", "value_bytes": 5, "version_age_s": 70.0, "expires_in_s": None,
       "fencing_token": "1:0:x"}  # fmt: skip
EVENT = {"at": 0, "level": "warning", "part": "limits", "text": "MQTT messages dropped " + "x" * 200, "count": 3}
ROWS: dict[str, dict[str, Any]] = {"clients": CLIENT, "topics": TOPIC, "groups": GROUP, "keys": KEY, "events": EVENT}


def lines(screen: Screen, page: dict[str, Any] | None, error: str = "", height: int = 24) -> list[str]:
    console = Console(width=80, height=height, file=io.StringIO(), force_terminal=False, highlight=False)
    console.print(draw(screen, OVERVIEW, page, error, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def of(row: dict[str, Any], count: int = 1) -> dict[str, Any]:
    return {"rows": [row] * count, "next": "abc", "total": 900, "matched": 800}


def pressed(keys: str, screen: Screen | None = None) -> Screen:
    screen = screen or Screen()
    for key in keys:
        screen.press(key)
    return screen


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.title)
@pytest.mark.parametrize("count", [0, 1, 500])
def test_every_view_fits_into_80_columns_and_24_lines(view: Any, count: int) -> None:
    screen = pressed(view.key)
    page = None if view.path == "overview" else of(ROWS[view.path], count)
    for height in (24, 12):
        shown = lines(screen, page, height=height)
        assert len(shown) == height
        assert max(map(len, shown)) <= 80
        assert "q quit" in shown[-1]
        assert "\x1b" not in "".join(shown)


def test_hops_and_clients_show_what_waits() -> None:
    text = "\n".join(lines(Screen(), None))
    for part in ("1,234 messages/s", "≤46480", "3 h 3 min", "warning disk: 1 GB is left (+1 more: penstock status)"):
        assert part in text
    text = "\n".join(lines(pressed("2"), of(CLIENT)))
    for part in ("meter-\\x1b[31m1", "offline", "QUEUE▼", "10000", "page 1+, 800 rows"):
        assert part in text
    assert "[bold]lake" in "\n".join(lines(pressed("4"), of(GROUP)))


def test_names_get_the_room_that_other_columns_do_not_need() -> None:
    row = {**CLIENT, "client_id": "penstock-demo-line-3-press", "address": "127.0.0.1:45600", "limits": []}
    assert "penstock-demo-line-3-press" in "\n".join(lines(pressed("2"), of(row)))


def test_an_empty_view_says_so() -> None:
    assert "no topics" in "\n".join(lines(pressed("3"), of(ROWS["topics"], 0)))
    assert "no topics match" in "\n".join(lines(pressed("3/x\r"), of(ROWS["topics"], 0)))


def test_an_error_replaces_the_last_line() -> None:
    assert "no node is reachable" in lines(Screen(), None, "no node is reachable")[-1]


def test_keys_sort_filter_and_page() -> None:
    screen = pressed("2")
    assert screen.parameters(20) == {"limit": 20, "sort": "-queued", "q": "", "after": None}
    pressed("r", screen)
    assert screen.sort == "queued"
    pressed("ss", screen)
    assert screen.sort == "-subscriptions"
    pressed("s", screen)
    assert screen.sort == "client_id"
    screen.next = "abc"
    pressed("n", screen)
    assert screen.parameters(20)["after"] == "abc"
    pressed("p", screen)
    assert screen.parameters(20)["after"] is None
    pressed("/mq1\x7f\r", screen)
    assert (screen.text, screen.typing) == ("mq", False)
    pressed("/x\x1b", screen)
    assert (screen.text, screen.typing) == ("", False)
    assert pressed("5/plant/\r").parameters(9)["prefix"] == "plant/"
    assert pressed("6").parameters(9) == {"limit": 9}
    assert pressed(" ").paused
    assert pressed("q").ended
    assert not pressed("2/q").ended


def test_a_paused_screen_requests_what_a_key_shows_and_nothing_else() -> None:
    requested: list[str] = []

    def get(path: str, _: object = None) -> dict[str, Any]:
        requested.append(path)
        return OVERVIEW if path == "overview" else of(ROWS[path])

    data, screen = NodeData(get), pressed("2")
    assert data.read(screen, 24, due=True)
    assert not data.read(pressed(" ", screen), 24, due=True)
    assert not data.read(screen, 30, due=True)  # as it was, in a larger window
    assert requested == ["overview", "clients"]
    for keys in ("3", "s", "n"):
        assert data.read(pressed(keys, screen), 24, due=False)
        assert "water" in "".join(text := lines(screen, data.page)), text
    assert data.read(pressed("1", screen), 24, due=False)
    assert data.page is None
    assert not data.read(screen, 24, due=True)
    assert data.read(pressed(" ", screen), 24, due=True)


def test_the_rows_are_not_those_of_an_earlier_response_after_an_error() -> None:
    def get(path: str, _: object = None) -> dict[str, Any]:
        if path == "topics":
            raise UnavailableError("no answer", why="it stopped")
        return OVERVIEW if path == "overview" else of(ROWS[path])

    data, screen = NodeData(get), pressed("2")
    data.read(screen, 24, due=True)
    data.read(pressed("3", screen), 24, due=True)
    assert (data.page, data.error) == (None, "no answer; it stopped")


def test_control_sequences_are_no_keys_except_for_pages() -> None:
    assert keys_of("\x1b[[A2\x1b[6~\x1b[5~\x1b[A\x1bOP\x1b[15;2~r") == "2npr"
    assert keys_of("\x1b") == "\x1b"  # Escape


def test_it_needs_a_terminal_and_a_known_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--http", "127.0.0.1:1"]) == 2
    assert "needs a terminal" in capsys.readouterr().err
    assert main(["top", "--view", "colours"]) == 2
    assert "hops, clients, topics, groups, keys, events" in capsys.readouterr().err

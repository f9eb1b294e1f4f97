"""`penstock top`: a live view of a node in the terminal, which fits into 80 columns and 24 lines.

`Screen` is the state of the view, which keys change, `NodeData` has the responses for it, and `draw` renders them; they
do not depend on a terminal.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from penstock.cli.node_api import NodeApi, NodeOptions, connects_to_node
from penstock.cli.options import Commands, duration_option
from penstock.cli.output import escape, shown_bytes, shown_count, shown_duration, shown_rate
from penstock.cli.parameters import completes
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["VIEWS", "NodeData", "Screen", "app", "draw", "keys_of"]

app = Commands()

_HEAD_LINES: Final = 3
_FOOT_LINES: Final = 1


class Column(NamedTuple):
    """A column of a view. ``sort``: its name in the API; "" if the list cannot be sorted by it. ``width`` 0:
    flexible."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]
    width: int = 0
    sort: str = ""
    right: bool = False


def _text(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "-" if row[name] is None else escape(str(row[name]))


def _age(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: shown_duration(row[name])


def _lag(row: Mapping[str, Any]) -> str:
    return "-" if row["lag_records"] is None else f"{'' if row.get('lag_exact', True) else '≤'}{row['lag_records']}"


def _oldest(row: Mapping[str, Any]) -> str:
    return shown_duration(row["lag_s"]) if row["lag_records"] and row["lag_s"] else "-"


def _hop(row: Mapping[str, Any]) -> str:
    return shown_rate(row["rate"], row["unit"])


def _topic_rate(row: Mapping[str, Any]) -> str:
    return shown_count(row["rate"])


class View(NamedTuple):
    """A view: the key that shows it, its title, path of the API, and columns."""

    key: str
    title: str
    path: str
    columns: tuple[Column, ...]
    first_sort: str = ""


VIEWS: Final = (
    View(
        "1", "Hops", "overview",
        (
            Column("HOP", _text("title"), 18), Column("RATE", _hop, 18, right=True),
            Column("TOTAL", _text("total"), 10, right=True), Column("WAITING", _lag, 10, right=True),
            Column("OLDEST", _oldest, 11, right=True), Column("ERRORS", _text("errors"), 7, right=True),
        ),
    ),
    View(
        "2", "Clients", "clients",
        (
            Column("CLIENT", _text("client_id"), 0, "client_id"),
            Column("STATE", lambda row: "online" if row["connected"] else "offline", 7, "connected"),
            Column("ADDRESS", _text("address"), 16), Column("QUEUE", _text("queued"), 6, "queued", right=True),
            Column("INFL", _text("inflight"), 5, "inflight", right=True),
            Column("SUBS", _text("subscriptions"), 5, "subscriptions", right=True),
            Column("LIMITS", lambda row: ",".join(row["limits"]) or "-", 12),
        ),
        "-queued",
    ),
    View(
        "3", "Topics", "topics",
        (
            Column("TOPIC", _text("topic"), 0, "topic"), Column("RATE/S", _topic_rate, 8, "rate", right=True),
            Column("SIZE", lambda row: shown_bytes(row["bytes"]), 9, "bytes", right=True),
            Column("PART", _text("partitions"), 5, right=True), Column("GROUPS", _text("groups"), 6, right=True),
            Column("LAG", _lag, 9, "lag_records", right=True), Column("OLDEST", _oldest, 11, "lag_s", right=True),
        ),
        "-lag_records",
    ),
    View(
        "4", "Groups", "groups",
        (
            Column("GROUP", _text("group"), 0, "group"), Column("STATE", _text("state"), 15),
            Column("MEMB", _text("members"), 5, "members", right=True),
            Column("LAG", _lag, 10, "lag_records", right=True), Column("OLDEST", _oldest, 11, "lag_s", right=True),
        ),
        "-lag_records",
    ),
    View(
        "5", "Keys", "keys",
        (
            Column("KEY", lambda row: escape(row["key"]) if row["key"] is not None else f"base64:{row['key_base64']}"),
            Column("BYTES", _text("value_bytes"), 7, right=True),
            Column("CHANGED", _age("version_age_s"), 11, right=True),
            Column("EXPIRES", _age("expires_in_s"), 11, right=True),
            Column("FENCED", lambda row: "yes" if row["fencing_token"] else "-", 6),
        ),
    ),
    View(
        "6", "Events", "events",
        (
            Column("TIME", lambda row: time.strftime("%H:%M:%S", time.localtime(row["at"] / 1000)), 8),
            Column("LEVEL", _text("level"), 8), Column("PART", _text("part"), 11),
            Column("EVENT", lambda row: escape(row["text"]) + (f" (x{row['count']})" if row["count"] > 1 else "")),
        ),
    ),
)  # fmt: skip
_BY_KEY: Final = {view.key: view for view in VIEWS}
HELP: Final = "1-6 view  s,r sort  / filter  n,p page  space pause  q quit"


@dataclass
class Screen:
    """State of the display: view, order, filter and page. :meth:`press` changes it."""

    view: View = VIEWS[0]
    sort: str = ""
    text: str = ""
    paused: bool = False
    typing: bool = False
    ended: bool = False
    cursors: list[str] = field(default_factory=list)
    """Cursors of this page and of earlier ones; empty on the first page."""
    next: str | None = None

    def press(self, key: str) -> None:
        """Handle a key."""
        if self.typing:
            self._type(key)
        elif key in _BY_KEY:
            self.view = _BY_KEY[key]
            self.sort, self.text, self.cursors, self.next = self.view.first_sort, "", [], None
        elif key == "q":
            self.ended = True
        elif key == " ":
            self.paused = not self.paused
        elif key == "/" and self.view.path not in {"overview", "events"}:
            self.typing = True
        elif key == "s":
            self._next_sort()
        elif key == "r" and self.sort:
            self.sort = self.sort.removeprefix("-") if self.sort.startswith("-") else f"-{self.sort}"
            self.cursors = []
        elif key == "n" and self.next is not None:
            self.cursors.append(self.next)
        elif key == "p" and self.cursors:
            self.cursors.pop()

    def parameters(self, rows: int) -> dict[str, object]:
        """Return the parameters of the request for a screen with ``rows`` rows."""
        if self.view.path == "overview":
            return {}
        if self.view.path == "events":
            return {"limit": rows}
        name = "prefix" if self.view.path == "keys" else "q"
        after = self.cursors[-1] if self.cursors else None
        return {"limit": rows, "sort": self.sort, name: self.text, "after": after}

    def _type(self, key: str) -> None:
        if key in {"\r", "\n"}:
            self.typing = False
        elif key == "\x1b":
            self.typing, self.text = False, ""
        elif key in {"\x7f", "\b"}:
            self.text = self.text[:-1]
        elif key.isprintable():
            self.text += key
        self.cursors = []

    def _next_sort(self) -> None:
        names = [column.sort for column in self.view.columns if column.sort]
        if names:
            now = self.sort.removeprefix("-")
            chosen = names[(names.index(now) + 1) % len(names)] if now in names else names[0]
            # Names ascending, numbers descending: the largest ones are of interest.
            self.sort = chosen if chosen == names[0] else f"-{chosen}"
            self.cursors = []


class NodeData:
    """Responses that a screen shows. ``get`` requests a path of the API, with parameters."""

    def __init__(self, get: Callable[..., dict[str, Any]]) -> None:
        self.overview: dict[str, Any] = {}
        self.page: dict[str, Any] | None = None
        self.error = ""
        self._get = get
        self._asked: object = None

    def read(self, screen: Screen, height: int, *, due: bool) -> bool:
        """Send the requests of ``screen`` if they are ``due`` and it is not paused, or if they are other ones than
        before; return whether they were sent."""
        path, parameters = screen.view.path, screen.parameters(max(1, height - _HEAD_LINES - 2))
        asked = path, {name: value for name, value in parameters.items() if name != "limit"}
        if asked == self._asked and (screen.paused or not due):
            return False
        self._asked = asked
        try:
            self.overview = self._get("overview")
            self.page = None if path == "overview" else self._get(path, parameters)
            screen.next = None if self.page is None else self.page.get("next")
            self.error = ""
        except PenstockError as failure:
            self.page, self.error = None, f"{failure.what}{f'; {failure.why}' if failure.why else ''}"
        return True


def draw(
    screen: Screen, overview: Mapping[str, Any], page: Mapping[str, Any] | None, error: str, height: int
) -> RenderableType:
    """Render ``screen`` in ``height`` lines. ``page``: the response for its view, if any."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = []
    if overview:
        node, load, health = overview["node"], overview["load"], overview["health"]
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(f"penstock {node['version']}  ", "bold")
        state = "ready" if health["ready"] else "NOT READY" if health["state"] == "ready" else health["state"]
        head.append(state, "green" if health["ready"] else "red")
        head.append(
            f"  up {shown_duration(node['uptime_s'])}  cpu {load['cpu']:.2f}  mem {shown_bytes(load['memory_bytes'])}"
            f"  delay {load['loop_delay_s'] * 1000:.0f} ms"
        )
        if screen.paused:
            head.append("  PAUSED", "reverse")
        lines.append(head)
        reasons = health["reasons"]
        text = "no problems" if not reasons else f"{reasons[0]['severity']} {reasons[0]['part']}: {reasons[0]['what']}"
        more = f" (+{len(reasons) - 1} more: penstock status)" if len(reasons) > 1 else ""
        lines.append(Text(escape(text) + more, "yellow" if reasons else "dim", no_wrap=True, overflow="ellipsis"))
    tabs = Text(no_wrap=True, overflow="ellipsis")
    for view in VIEWS:
        tabs.append(f" {view.key} {view.title} ", "reverse" if view is screen.view else "")
    if screen.text or screen.typing:
        name = "prefix" if screen.view.path == "keys" else "filter"
        tabs.append(f"  {name}: {escape(screen.text)}{'_' if screen.typing else ''}", "bold")
    lines.append(tabs)
    lines.append(_table(screen, page, _rows(screen, overview, page), height - _HEAD_LINES - _FOOT_LINES - 1))
    foot = error or _position(screen, page) + HELP
    lines.append(Text(escape(foot), "red" if error else "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _rows(screen: Screen, overview: Mapping[str, Any], page: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if screen.view.path == "overview":
        found: Sequence[Mapping[str, Any]] = overview.get("hops", ())
        return found
    return () if page is None else page["rows"]


def _table(
    screen: Screen, page: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], height: int
) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    now, falling = screen.sort.removeprefix("-"), screen.sort.startswith("-")
    shown = rows[: max(0, height)]
    for column in screen.view.columns:
        mark = "" if not column.sort or column.sort != now else "▼" if falling else "▲"
        width = column.width
        if width and not column.right:  # the first column, with the names, gets the rest; numbers change too often
            width = min(width, max(len(column.title + mark), *(len(column.cell(row)) for row in shown), 0))
        table.add_column(
            column.title + mark,
            width=width or None,
            ratio=None if column.width else 1,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in shown:
        table.add_row(*(Text(column.cell(row), no_wrap=True, overflow="ellipsis") for column in screen.view.columns))
    if not shown and page is not None:
        table.add_row(Text(f"no {screen.view.title.lower()}{' match' if screen.text else ''}", "dim"))
    for _ in range(height - max(len(shown), 1)):
        table.add_row()
    return table


def _position(screen: Screen, page: Mapping[str, Any] | None) -> str:
    if page is None or "total" not in page:
        return ""
    matched = page.get("matched")
    of = page["total"] if matched is None else matched
    return f"page {len(screen.cursors) + 1}{'+' if page.get('next') else ''}, {of} row{'' if of == 1 else 's'}  "


@app.add(
    "penstock top", "penstock top --view clients", "penstock top --http https://node.example:8080 --ca-file ca.pem"
)
@connects_to_node
def top(
    view: Annotated[
        str,
        typer.Option(
            help="First view: " + ", ".join(v.title.lower() for v in VIEWS) + ".",
            metavar="NAME",
            autocompletion=completes(v.title.lower() for v in VIEWS),
        ),
    ] = "hops",
    interval: Annotated[float, duration_option(text="Time between two requests.", at_least_s=0.2, default="2s")] = 2.0,
    *,
    node: NodeOptions,
) -> None:
    """Show a live view of a node: hops, MQTT clients, topics, consumer groups, keys, events.

    Keys: 1 to 6 choose the view, s and r its order, / a filter (Enter keeps it, Escape removes it), n and p the page,
    space pauses, q quits.
    """
    names = {each.title.lower(): each for each in VIEWS}
    if view not in names:
        raise ConfigError(f"--view: got {view!r}", option="--view", hint="use one of: " + ", ".join(names))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "penstock top needs a terminal", hint="use penstock status --json, or penstock status --watch 5s"
        )
    api = node.connect()
    api.get("overview")  # an error here concerns the options of the command
    screen = Screen()
    screen.press(names[view].key)
    _run(api, screen, interval)


def _run(api: NodeApi, screen: Screen, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    data = NodeData(api.get)
    due_s = 0.0
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.ended:
            height = console.size.height
            if data.read(screen, height, due=time.monotonic() >= due_s):
                due_s = time.monotonic() + interval_s
            live.update(draw(screen, data.overview, data.page, data.error, height), refresh=True)
            pressed = keys(max(0.05, min(interval_s, due_s - time.monotonic())))
            for key in pressed:
                screen.press(key)
            if pressed:
                due_s = 0.0


def keys_of(text: str) -> str:
    """Return the keys in input of a terminal: `n` and `p` for Page Down and Page Up, none for other sequences."""
    return _SEQUENCE.sub(lambda found: _PAGE_KEYS.get(found[0], ""), text)


_SEQUENCE: Final = re.compile(r"\x1b(?:\[\[?[0-?]*[ -/]*[@-~]|O.)")
_PAGE_KEYS: Final = {"\x1b[6~": "n", "\x1b[5~": "p"}


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys from the terminal, without echo; yields a function that waits for a key, for some seconds at
    most."""
    import os

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return keys_of(os.read(descriptor, 64).decode("utf-8", "ignore")) if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield read
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

"""Generate a reference page for each state store command from its row in ``COMMANDS``.

Responses are not stored: the engine executes every example, in each form, when the page is generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.statestore.binding import (
    INVOKE,
    OLDER_INVOKE,
    StoreRequest,
    answer_payload,
    answer_properties,
    notification,
    read_request,
    response,
)
from penstock.statestore.codec.commands import (
    COMMANDS,
    EXAMPLE_TIME_MS,
    OPTION_EXTENSIONS,
    Access,
    CommandSpec,
    Example,
    Extension,
    Verb,
    parse_payload,
)
from penstock.statestore.codec.dialects import DIALECTS, SDK, Dialect
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.engine.observers import History
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.requests import Answer, AnswerKind
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import EXTENSIONS, OPTIONAL_EXTENSIONS

__all__ = ["OFFERED", "answered_cases", "command_lists", "extension_table", "pages", "permissions"]

STEP_MS: Final = 1000
"""Time between two requests of an example."""

TOKEN: Final = f"{EXAMPLE_TIME_MS}:1:StateStore"
LOWER: Final = f"{EXAMPLE_TIME_MS}:0:StateStore"
FAR: Final = f"{EXAMPLE_TIME_MS + 60_001 + 5 * STEP_MS}:0:app"

OFFERED: Final = {
    Extension.NONE: "always",
    **{extension: f"extension `{name}`" for name, extension in EXTENSIONS.items()},
    Extension.SCAN: "unless `scan: false`",
}


@dataclass(frozen=True)
class Asked:
    """A request of an example: words or a payload, with time stamp and token; ``now`` is a valid time stamp."""

    words: str | bytes
    ts: str | None = "now"
    ft: str | None = None
    fence_prefix: str | None = None

    @property
    def payload(self) -> bytes:
        if isinstance(self.words, bytes):
            return self.words
        return encode_array([b"" if word == "''" else word.encode() for word in self.words.split(" ")])

    def told(self) -> str:
        told = escaped(self.words) if isinstance(self.words, bytes) else f"`{self.words}`"
        for name, value in (("__ts", self.ts), ("__ft", self.ft), ("__fencePrefix", self.fence_prefix)):
            if name == "__ts" and value == "now":
                continue
            if value is not None or name == "__ts":
                told += f", `{name}` " + ("absent" if value is None else "twice" if not value else f"`{value}`")
        return told


@dataclass(frozen=True)
class Case:
    """A row of a page: preceding requests, and the request whose response is shown."""

    title: str
    asked: Asked
    before: tuple[Asked, ...] = ()
    extensions: Extension = Extension.SCAN
    max_keys: int = 0
    granted: bool = True


def example_case(spec: CommandSpec, example: Example) -> Case:
    """Return the row of an example in the table of commands, with the command's extension enabled."""
    return Case(
        example.title,
        Asked(example.request, ft=example.token, fence_prefix=example.fence_prefix),
        tuple(Asked(words, ft=TOKEN if example.fenced else None) for words in example.before),
        Extension.SCAN | spec.extension | example.extension,
        example.max_keys,
    )


def answered_cases(spec: CommandSpec) -> list[Case]:
    """Return the rows of the responses of a command."""
    return [example_case(spec, example) for example in spec.examples]


def refused_cases(spec: CommandSpec) -> list[Case]:
    """Return the rows of the errors of a command: first those derived from its row in the table, then its own."""
    enabled = Extension.SCAN | spec.extension
    words = spec.examples[0].request
    verb, *arguments = words.split(" ")
    named = spec.syntax.split(" ")[1]
    fenced = (Asked("SET k v", ft=TOKEN),)
    found = {
        "not RESP3": Asked(words.encode() + b"\r\n"),
        "mixed case": Asked(f"{verb[0]}{words[1:].lower()}"),
        "too few arguments": Asked(" ".join([verb, *arguments][: spec.min_args - 1])),
    }
    if spec.min_args == spec.max_args:
        found["too many arguments"] = Asked(f"{words} more")
    if named.isalpha():
        found[f"empty {named}"] = Asked(" ".join([verb, "''", *arguments[1:]]))
    cases = [Case(title, asked, extensions=enabled) for title, asked in found.items()]
    if not spec.authorizes_each_key:
        cases.append(Case("denied by the policy", Asked(words), extensions=enabled, granted=False))
    stamps = {
        "no time stamp": None,
        "malformed time stamp": "yesterday",
        "two time stamps": "",
        "time stamp more than a minute ahead": FAR,
    }
    cases += [
        Case(title, Asked(words, ts=ts), extensions=enabled)
        for title, ts in stamps.items()
        if ts is not None or spec.needs_timestamp
    ]
    tokens: dict[str, str | None] = {"malformed token": "x", "token more than a minute ahead": FAR}
    if not spec.authorizes_each_key:
        tokens |= {"no token for a fenced key": None, "a lower token": LOWER}
    if spec.checks_fence:
        cases += [Case(title, Asked(words, ft=ft), fenced, enabled) for title, ft in tokens.items()]
    if spec.extension:
        cases.append(Case("command not enabled", Asked(words), extensions=Extension.SCAN & ~spec.extension))
    return [*cases, *(example_case(spec, example) for example in spec.errors)]


def escaped(data: bytes) -> str:
    """Return bytes as code in a table, with escapes for line ends and binary data."""
    return "`" + repr(data)[2:-1].replace("|", "\\|") + "`"


class Store:
    """An engine for one form, whose clock advances by one second per request."""

    def __init__(self, dialect: Dialect, case: Case) -> None:
        self.dialect = dialect
        self.case = case
        self.engine = Engine(
            max_keys=case.max_keys,
            extensions=case.extensions,
            authorise=None if case.granted else lambda *_: False,
            secret=b"a store of this page",
        )
        if case.extensions & (Extension.RESUME | Extension.AS_OF):
            self.engine.history = History(Hlc(EXAMPLE_TIME_MS - 1, 0, ""), 100, 1 << 20)
        self.now = EXAMPLE_TIME_MS - STEP_MS
        self.changes: list[Change] = []

    def ask(self, asked: Asked) -> Publish:
        self.now += STEP_MS
        publish = self._request(asked)
        ask = read_request(publish, "app", self.now, self.now)
        assert isinstance(ask, StoreRequest)
        assert ask.dialect is self.dialect
        command = parse_payload(asked.payload, self.case.extensions)
        if isinstance(command, StoreError):
            answer = Answer(AnswerKind.ERROR, error=command)
        else:
            answer, changes = self.engine.execute(command, ask, self.now, self.now)
            self.changes += changes
        payload = answer_payload(answer, ask.dialect)
        return response(ask.response_topic, payload, answer_properties(ask, answer, 0))

    def _request(self, asked: Asked) -> Publish:
        dialect = self.dialect
        user = [("__protVer", "1.0")] if dialect.status else []
        stamp = f"{self.now}:0:app" if asked.ts == "now" else asked.ts
        if stamp is not None:
            user += [(dialect.timestamp_property, stamp or "1:0:app")] * (1 if stamp else 2)
        user += [(dialect.fence_property, asked.ft)] if asked.ft is not None else []
        user += [("__fencePrefix", asked.fence_prefix)] if asked.fence_prefix is not None else []
        topic = OLDER_INVOKE if dialect.timestamp_property == "Timestamp" else INVOKE
        properties = Properties(response_topic="clients/app/response", correlation_data=b"1", user_properties=user)
        return Publish(topic, asked.payload, 1, properties=properties)


def answered(case: Case, dialect: Dialect) -> str:
    """Return the response of the store to the example in this form."""
    store = Store(dialect, case)
    for asked in case.before:
        assert not store.ask(asked).payload.startswith(b"-"), (case, asked)
    message = store.ask(case.asked)
    version = message.properties.user_property(dialect.timestamp_property)
    told = escaped(message.payload)
    return told if version is None else f"{told} `{version}`"


def _answer_table(cases: Sequence[Case]) -> list[str]:
    lines = [f"| case | request | {' | '.join(DIALECTS)} |", "| --- | --- |" + " --- |" * len(DIALECTS)]
    for case in cases:
        cells = [answered(case, dialect) for dialect in DIALECTS.values()]
        lines.append(f"| {case.title} | {case.asked.told()} | {' | '.join(cells)} |")
    return lines


def _error_table(cases: Sequence[Case]) -> list[str]:
    lines = ["| case | request | response |", "| --- | --- | --- |"]
    for case in cases:
        told = answered(case, SDK)
        assert told.startswith("`-ERR "), (case, told)
        lines.append(f"| {case.title} | {case.asked.told()} | {told} |")
    return lines


def _notification_table() -> list[str]:
    lines = [f"| change | {' | '.join(DIALECTS)} |", "| --- |" + " --- |" * len(DIALECTS)]
    changes = {"SET, including lease renewals": Asked("SET k v"), "DEL, VDEL, expiry": Asked("DEL k")}
    rows: dict[str, list[str]] = {title: [] for title in changes}
    for dialect in DIALECTS.values():
        store = Store(dialect, Case("", Asked("")))
        for title, asked in changes.items():
            store.ask(asked)
            message = notification(store.changes[-1], "app", dialect)
            version = message.properties.user_property(dialect.timestamp_property)
            rows[title].append(f"{escaped(message.payload)} `{version}`")
            topic = message.topic
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()]
    return ["", "## Notifications", "", f"Client `app`, key `k`: to `{topic}`, QoS 1.", "", *lines]


def permissions(spec: CommandSpec) -> str:
    """Return the permissions that a command needs, as text."""
    return " and ".join(str(permission.name).capitalize() for permission in spec.access)


def _facts(spec: CommandSpec) -> list[str]:
    return [
        "| | |",
        "| --- | --- |",
        f"| arguments, with the verb | {spec.min_args} to {spec.max_args} |",
        f"| access | {permissions(spec)} |",
        f"| time stamp | {'required' if spec.needs_timestamp else 'optional; checked if present'} |",
        f"| fencing token | {'checked' if spec.checks_fence else 'ignored'} |",
        f"| available | {OFFERED[spec.extension]} |",
    ]


def _page(spec: CommandSpec, note: str) -> str:
    text = inspect.cleandoc(spec.text)
    lines = [f"# {spec.verb}", "", note, "", f"`{spec.syntax}`: {spec.summary}.", "", *_facts(spec), "", text, ""]
    lines += ["## Responses", ""]
    lines += ["Each response is shown with its version, if it has one: `__ts`, in the older form `Timestamp`.", ""]
    lines += _answer_table(answered_cases(spec))
    if spec.verb is Verb.KEYNOTIFY:
        lines += _notification_table()
    lines += ["", "## Errors", ""]
    lines += ["The texts are the same in every form, except for a lower token. In the SDK form `__stat` is 200.", ""]
    lines += _error_table(refused_cases(spec))
    lines += [
        "",
        (
            "See the [state store protocol](../state-store.md) for the format of requests and the order of checks. "
            f"In the examples client `app` sends the time stamp `{EXAMPLE_TIME_MS}:0:app`, {STEP_MS} ms "
            "more with every request."
        ),
    ]
    return "\n".join([*lines, ""])


def pages(note: str) -> dict[str, Callable[[], str]]:
    """Return the pages by file name."""
    return {f"state-store/{spec.verb.lower()}.md": partial(_page, spec, note) for spec in COMMANDS.values()}


def extension_table() -> list[str]:
    """Return the extensions with the requests that use them: extensions that are commands from their rows, options from
    their own table.

    Raises:
        ValueError: an extension has neither a command nor a text.
    """
    lines = ["| extension | request | effect |", "| --- | --- | --- |"]
    for name in OPTIONAL_EXTENSIONS:
        extension = EXTENSIONS[name]
        specs = [spec for spec in COMMANDS.values() if spec.extension is extension]
        if specs:
            request = ", ".join(f"`{spec.syntax}`" for spec in specs)
            effect = "; ".join(spec.summary for spec in specs)
        elif extension in OPTION_EXTENSIONS:
            request, effect = OPTION_EXTENSIONS[extension].request, OPTION_EXTENSIONS[extension].effect
        else:
            raise ValueError(
                f"extension {name}: no row of COMMANDS has it; describe it in OPTION_EXTENSIONS"
                " (src/penstock/statestore/codec/commands.py)"
            )
        lines.append(f"| `{name}` | {request} | {effect} |")
    return lines


def _names(specs: Iterable[CommandSpec]) -> str:
    return ", ".join(spec.verb for spec in specs)


def command_lists() -> dict[str, str]:
    """Return the lists of commands by their names in ``<!-- commands: NAME -->`` of hand-written pages."""
    specs = COMMANDS.values()
    return {
        "read": _names(spec for spec in specs if Access.READ in spec.access),
        "write": _names(spec for spec in specs if Access.WRITE in spec.access),
        "extensions": _names(spec for spec in specs if spec.extension and spec.extension is not Extension.SCAN),
    }

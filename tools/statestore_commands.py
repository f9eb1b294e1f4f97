"""Generate a reference page for each state store command, with requests and responses in each form.

Responses are not stored: the engine executes every example, in each form, when the page is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from librt.strings import BytesWriter

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.statestore.binding import INVOKE, OLDER_INVOKE, StoreRequest, notification, read_request, response
from penstock.statestore.codec.commands import (
    COMMANDS,
    CommandSpec,
    Condition,
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
from penstock.statestore.options import EXTENSIONS

__all__ = ["OFFERED", "pages", "permissions"]

NOW: Final = 1_696_374_425_000
STEP_MS: Final = 1000
"""Time between two requests of an example."""

TOKEN: Final = Hlc(NOW, 1, "StateStore")
LOWER: Final = Hlc(NOW, 0, "StateStore")
FAR: Final = f"{NOW + 60_001 + 5 * STEP_MS}:0:app"
PUBLISHED_ALWAYS: Final = Extension.SCAN
EVERYTHING: Final = ~Extension.NONE

OFFERED: Final = {
    Extension.NONE: "always",
    **{extension: f"extension `{name}`" for name, extension in EXTENSIONS.items()},
    Extension.SCAN: "unless `scan: false`",
}


@dataclass(frozen=True)
class Asked:
    """A request: words or a payload, with time stamp and token; ``now`` is a valid time stamp."""

    words: str | bytes
    ts: str | None = "now"
    ft: str | Hlc | None = None
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
    """An example: preceding requests, and the request whose response is shown."""

    title: str
    asked: Asked
    before: tuple[Asked, ...] = ()
    extensions: Extension = PUBLISHED_ALWAYS
    max_keys: int = 0
    granted: bool = True


a = Asked
K: Final = (a("SET k v"),)
FENCED: Final = (a("SET k v", ft=TOKEN),)

CASES: Final[dict[Verb, Sequence[Case]]] = {
    Verb.SET: (
        Case("set", a("SET k v")),
        Case("set again", a("SET k w"), K),
        Case("with an expiry of 5 s", a("SET k v PX 5000")),
        Case("NX, the key does not exist", a("SET k v NX")),
        Case("NX, the key exists", a("SET k w NX"), K),
        Case("NEX, the key does not exist", a("SET k v NEX PX 5000")),
        Case("NEX, the key has this value (renewal of a lease)", a("SET k v NEX PX 5000"), K),
        Case("NEX, the key has another value (lease of another client)", a("SET k w NEX PX 5000"), K),
        Case("NEX with the expected value", a("SET k w NEX v"), K),
        Case("with a fencing token", a("SET k v", ft=TOKEN)),
        Case("with a lower token", a("SET k w", ft=LOWER), FENCED),
        Case(
            "with a prefix fence, if the extension is enabled",
            a("SET k v", ft=TOKEN, fence_prefix="out/"),
            extensions=EVERYTHING,
        ),
    ),
    Verb.GET: (
        Case("the key exists", a("GET k"), K),
        Case("empty value", a("GET k"), (a("SET k ''"),)),
        Case("the key does not exist", a("GET k")),
        Case(
            "as of an older version, if the extension is enabled",
            a(f"GET k ASOF {TOKEN}"),
            (*K, a("SET k w")),
            EVERYTHING,
        ),
    ),
    Verb.DEL: (
        Case("the key exists", a("DEL k"), K),
        Case("the key does not exist", a("DEL k")),
        Case("fenced, with its token", a("DEL k", ft=TOKEN), FENCED),
        Case("fenced, with a lower token", a("DEL k", ft=LOWER), FENCED),
        Case("not fenced, with a token", a("DEL k", ft=TOKEN), K),
    ),
    Verb.VDEL: (
        Case("the key has this value (release of a lock)", a("VDEL k v"), K),
        Case("the key has another value", a("VDEL k w"), K),
        Case("the key does not exist", a("VDEL k v")),
        Case("fenced, with its token", a("VDEL k v", ft=TOKEN), FENCED),
        Case("fenced, with a lower token", a("VDEL k v", ft=LOWER), FENCED),
    ),
    Verb.KEYNOTIFY: (
        Case("observe", a("KEYNOTIFY k")),
        Case("already observed", a("KEYNOTIFY k"), (a("KEYNOTIFY k"),)),
        Case("with the argument of early brokers", a("KEYNOTIFY k GET")),
        Case("stop observing", a("KEYNOTIFY k STOP"), (a("KEYNOTIFY k"),)),
        Case("stop without an observation", a("KEYNOTIFY k STOP")),
        Case("a prefix, if the extension is enabled", a("KEYNOTIFY line/ PREFIX"), K, EVERYTHING),
        Case("resume, if the extension is enabled", a(f"KEYNOTIFY k AFTER {TOKEN}"), K, EVERYTHING),
    ),
    Verb.SCAN: (
        Case("matching keys", a("SCAN line/*"), (a("SET line/1 v"), a("SET line/2 v"), a("SET other v"))),
        Case("one byte, a class, a literal asterisk", a("SCAN [a-c]?[*]"), (a("SET a1* v"), a("SET d1* v"))),
        Case("no matching key", a("SCAN line/*")),
    ),
    Verb.MGET: (Case("one key exists, one does not", a("MGET k none"), K, EVERYTHING),),
    Verb.MVALUES: (Case("one key exists, one does not", a("MVALUES k none"), K, EVERYTHING),),
    Verb.PTTL: (
        Case("the key expires", a("PTTL k"), (a("SET k v PX 5000"),), EVERYTHING),
        Case("the key does not expire", a("PTTL k"), K, EVERYTHING),
        Case("the key does not exist", a("PTTL k"), (), EVERYTHING),
    ),
    Verb.BATCH: (
        Case("set two keys, delete a missing one", a("BATCH 3 SET k v 5 SET l v PX 5000 2 DEL m"), (), EVERYTHING),
        Case("a condition is not met", a("BATCH 4 SET k w NX 3 VDEL k x"), K, EVERYTHING),
        Case("one key fenced with a higher token", a("BATCH 3 SET k w 3 SET l w", ft=LOWER), FENCED, EVERYTHING),
        Case("the same key twice", a("BATCH 3 SET k w 2 DEL k"), K, EVERYTHING),
    ),
}


def _stamped(words: str, *, needed: bool) -> list[Case]:
    cases = [
        Case("malformed time stamp", a(words, ts="yesterday")),
        Case("two time stamps", a(words, ts="")),
        Case("time stamp more than a minute ahead", a(words, ts=FAR)),
    ]
    return [Case("no time stamp", a(words, ts=None)), *cases] if needed else cases


def _fenced(words: str) -> list[Case]:
    return [
        Case("malformed token", a(words, ft="x"), FENCED),
        Case("token more than a minute ahead", a(words, ft=FAR), FENCED),
        Case("no token for a fenced key", a(words), FENCED),
        Case("a lower token", a(words, ft=LOWER), FENCED),
    ]


def _refused(verb: Verb, words: str, *, needed: bool = False) -> list[Case]:
    spec = COMMANDS[verb]
    cases = [
        Case("not RESP3", a(words.encode() + b"\r\n")),
        Case("mixed case", a(f"{verb[0]}{words[1:].lower()}")),
        Case("too few arguments", a(" ".join(words.split(" ")[: spec.min_args - 1]))),
        Case("empty key", a(" ".join([verb, "''", *words.split(" ")[2:]]))),
        Case("denied by the policy", a(words), granted=False),
    ]
    if verb is Verb.GET or spec.min_args == spec.max_args:
        cases.insert(3, Case("too many arguments", a(f"{words} more")))
    cases += _stamped(words, needed=needed)
    if not spec.extension:
        return cases
    return [*(replace(case, extensions=EVERYTHING) for case in cases), Case("command not enabled", a(words))]


REFUSED: Final[dict[Verb, Sequence[Case]]] = {
    Verb.SET: (
        *_refused(Verb.SET, "SET k v", needed=True),
        Case("unknown option", a("SET k v XX")),
        Case("both conditions", a("SET k v NX NEX")),
        Case("invalid expiry", a("SET k v PX 0")),
        *_fenced("SET k w"),
        Case("quota", a("SET other v"), K, max_keys=1),
        Case("prefix fence without the extension", a("SET k v", ft=TOKEN, fence_prefix="out/")),
        Case("prefix fence without a token", a("SET k v", fence_prefix="out/"), extensions=EVERYTHING),
    ),
    Verb.GET: (
        *_refused(Verb.GET, "GET k"),
        Case("ASOF without the extension", a(f"GET k ASOF {TOKEN}"), K),
        Case("ASOF a version before the history", a("GET k ASOF 1:0:x"), K, EVERYTHING),
    ),
    Verb.DEL: (*_refused(Verb.DEL, "DEL k"), *_fenced("DEL k")),
    Verb.VDEL: (*_refused(Verb.VDEL, "VDEL k v"), *_fenced("VDEL k v")),
    Verb.KEYNOTIFY: (
        *_refused(Verb.KEYNOTIFY, "KEYNOTIFY k"),
        Case("unknown option", a("KEYNOTIFY k ONCE")),
        Case("too many options", a("KEYNOTIFY k STOP STOP")),
        Case("PREFIX without the extension", a("KEYNOTIFY line/ PREFIX")),
        Case("AFTER a version before the history", a("KEYNOTIFY k AFTER 1:0:x"), K, EVERYTHING),
    ),
    Verb.SCAN: (
        Case("too few arguments", a("SCAN")),
        Case("too many arguments", a("SCAN * token more")),
        Case("empty pattern", a("SCAN ''")),
        Case("invalid continuation token", a("SCAN * 1;2;x")),
        Case("command not enabled", a("SCAN *"), extensions=Extension.NONE),
        *_stamped("SCAN *", needed=False),
    ),
    Verb.MGET: _refused(Verb.MGET, "MGET k"),
    Verb.MVALUES: _refused(Verb.MVALUES, "MVALUES k"),
    Verb.PTTL: _refused(Verb.PTTL, "PTTL k"),
    Verb.BATCH: (
        Case("not RESP3", a(b"BATCH 2 DEL k\r\n")),
        Case("mixed case", a("Batch 2 DEL k"), extensions=EVERYTHING),
        Case("too few arguments", a("BATCH 1 DEL"), extensions=EVERYTHING),
        Case("too few arguments of one command", a("BATCH 2 SET k 2 DEL k"), extensions=EVERYTHING),
        Case("wrong number of words", a("BATCH 3 DEL k"), extensions=EVERYTHING),
        Case("a command that BATCH does not accept", a("BATCH 2 GET k"), extensions=EVERYTHING),
        Case("empty key in one command", a("BATCH 2 DEL k 2 DEL ''"), extensions=EVERYTHING),
        *(replace(case, extensions=EVERYTHING) for case in _stamped("BATCH 3 SET k v", needed=True)),
        *(replace(case, extensions=EVERYTHING) for case in _fenced("BATCH 3 SET k w")[:2]),
        Case(
            "a prefix fence, which BATCH does not support",
            a("BATCH 3 SET k v", ft=TOKEN, fence_prefix="out/"),
            extensions=EVERYTHING,
        ),
        Case("command not enabled", a("BATCH 2 DEL k")),
    ),
}


def escaped(data: bytes) -> str:
    """Bytes as code in a table, with escapes for line ends and binary data."""
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
        if case.extensions & Extension.RESUME:
            self.engine.history = History(Hlc(NOW - 1, 0, ""), 100, 1 << 20)
        self.now = NOW - STEP_MS
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
        message = response(ask, answer, self.now, BytesWriter())
        assert message is not None
        return message

    def _request(self, asked: Asked) -> Publish:
        dialect = self.dialect
        user = [("__protVer", "1.0")] if dialect.status else []
        stamp = f"{self.now}:0:app" if asked.ts == "now" else asked.ts
        if stamp is not None:
            user += [(dialect.timestamp_property, stamp or "1:0:app")] * (1 if stamp else 2)
        user += [(dialect.fence_property, str(asked.ft))] if asked.ft is not None else []
        user += [("__fencePrefix", asked.fence_prefix)] if asked.fence_prefix is not None else []
        topic = OLDER_INVOKE if dialect.timestamp_property == "Timestamp" else INVOKE
        properties = Properties(response_topic="clients/app/response", correlation_data=b"1", user_properties=user)
        return Publish(topic, asked.payload, 1, properties=properties)


def answered(case: Case, dialect: Dialect) -> str:
    """Response of the store to the example in this form."""
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
    changes = {"SET, including lease renewals": a("SET k v"), "DEL, VDEL, expiry": a("DEL k")}
    rows: dict[str, list[str]] = {title: [] for title in changes}
    for dialect in DIALECTS.values():
        store = Store(dialect, Case("", a("")))
        for title, asked in changes.items():
            store.ask(asked)
            message = notification(store.changes[-1], "app", dialect)
            version = message.properties.user_property(dialect.timestamp_property)
            rows[title].append(f"{escaped(message.payload)} `{version}`")
            topic = message.topic
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()]
    return ["", "## Notifications", "", f"Client `app`, key `k`: to `{topic}`, QoS 1.", "", *lines]


def permissions(spec: CommandSpec) -> str:
    """The permissions that a command needs, in words."""
    return " and ".join(str(permission.name).capitalize() for permission in spec.access)


def _facts(spec: CommandSpec) -> list[str]:
    access = permissions(spec)
    if spec.verb in (Verb.SET, Verb.VDEL):
        asked = ", ".join(name.name for name in Condition if name is not Condition.ALWAYS)
        access += "; with `security.strict_read` also Read" + (f" for {asked}" if spec.verb is Verb.SET else "")
    fence = "checked and stored" if spec.verb is Verb.SET else "checked" if spec.checks_fence else "ignored"
    return [
        "| | |",
        "| --- | --- |",
        f"| arguments, with the verb | {spec.min_args} to {spec.max_args} |",
        f"| access | {access} |",
        f"| time stamp | {'required' if spec.needs_timestamp else 'optional; checked if present'} |",
        f"| fencing token | {fence} |",
        f"| available | {OFFERED[spec.extension]} |",
    ]


def _page(spec: CommandSpec, note: str, text: str) -> str:
    lines = [f"# {spec.verb}", "", note, "", f"`{spec.syntax}`: {spec.summary}.", "", *_facts(spec), "", text, ""]
    lines += ["## Responses", ""]
    lines += ["Each response is shown with its version, if it has one: `__ts`, in the older form `Timestamp`.", ""]
    lines += _answer_table(CASES[spec.verb])
    if spec.verb is Verb.KEYNOTIFY:
        lines += _notification_table()
    lines += ["", "## Errors", ""]
    lines += ["The texts are the same in every form, except for a lower token. In the SDK form `__stat` is 200.", ""]
    lines += _error_table(REFUSED[spec.verb])
    lines += [
        "",
        (
            "See the [state store protocol](../state-store.md) for the format of requests and the order of checks. "
            f"In the examples client `app` sends the time stamp `{NOW}:0:app`, {STEP_MS} ms more with every request."
        ),
    ]
    return "\n".join([*lines, ""])


def pages(note: str, texts: Path) -> dict[str, Callable[[], str]]:
    """Pages by file name; ``texts`` has the hand-written part of each command below a heading with its name.

    Raises:
        ValueError: a command has no text, or a heading is not a command.
    """
    written = _by_heading(texts.read_text(encoding="utf-8"))
    if wrong := {spec.verb.name for spec in COMMANDS.values()} ^ written.keys():
        raise ValueError(f"{texts.name}: expected a heading `# NAME` with text for each command; see {sorted(wrong)}")

    def writer(spec: CommandSpec, text: str) -> Callable[[], str]:
        return lambda: _page(spec, note, text)

    return {f"state-store/{spec.verb.lower()}.md": writer(spec, written[spec.verb.name]) for spec in COMMANDS.values()}


def _by_heading(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        found[name.strip()] = body.strip()
    return found

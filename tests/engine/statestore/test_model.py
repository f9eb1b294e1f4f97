"""Random histories of all commands, with clock steps, against a sequential model written without the engine.

Each command has a rule. Rules of reads call the client, whose requests the engine answers by way of their messages, so
one rule covers parser, engine, response and client; rules of writes look at the engine's answer and changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.mqtt.client import MqttClient
from penstock.statestore.binding import StoreRequest, answer_payload, answer_properties, read_request, request, response
from penstock.statestore.client.client import Expiry, StateStoreClient
from penstock.statestore.client.observations import Entry
from penstock.statestore.client.requests import RequestSender
from penstock.statestore.codec.commands import COMMANDS, Access, Command, Extension, Verb, parse, parse_payload
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import decode_page
from penstock.statestore.engine import scan
from penstock.statestore.engine.observers import History
from penstock.statestore.engine.quotas import Quotas
from penstock.statestore.engine.record import RECORD_BYTES, Change, Record
from penstock.statestore.engine.requests import Answer, AnswerKind, Context
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import Hlc
from penstock.statestore.hlc import parse as parse_version

T = TypeVar("T")

START = 1_700_000_000_000

KEYS = st.sampled_from([b"a", b"b"])
VALUES = st.sampled_from([b"", b"1", b"2"])
CLIENTS = st.sampled_from(["x", "y"])
TOKENS = st.none() | st.integers(0, 2)
TTLS = st.none() | st.integers(1, 30)
SKEWS = st.sampled_from([-100_000, -1, 0, 0, 0, 5, 60_000, 60_001])
PREFIXES = st.sampled_from([b"a", b"r"])
PATTERNS: dict[bytes, set[bytes]] = {
    b"*": {b"a", b"b", b"run"},
    b"?": {b"a", b"b"},
    b"[!a]*": {b"b", b"run"},
    b"r*n": {b"run"},
    b"a?": set(),
}


@dataclass
class Kept:
    """What the model keeps of a key."""

    value: bytes
    version: tuple[int, int]
    token: int | None
    deadline: int | None


@dataclass
class Model:
    """The store as the document describes it: a dictionary, and every version ever given."""

    keys: dict[bytes, Kept] = field(default_factory=dict)
    watchers: dict[bytes, set[str]] = field(default_factory=dict)
    prefix_watchers: dict[bytes, set[str]] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)
    max_keys: int = 0
    max_bytes: int = 0
    floors: dict[bytes, int] = field(default_factory=dict)
    timeline: list[tuple[tuple[int, int], bytes, bytes | None]] = field(default_factory=list)
    known_from: tuple[int, int] = (0, 0)
    greatest: tuple[int, int] = (0, 0)
    told: list[tuple[str, bytes, bytes | None]] = field(default_factory=list)

    def changed(self, key: bytes, value: bytes | None) -> None:
        clients = set(self.watchers.get(key, ()))
        for prefix, watching in self.prefix_watchers.items():
            clients |= watching if key.startswith(prefix) else set()
        self.told += [(client, key, value) for client in sorted(clients)]
        if value is None:
            self.removed.add(key)

    def expire(self, now: int) -> None:
        due = sorted((kept.deadline, key) for key, kept in self.keys.items() if kept.deadline is not None)
        for deadline, key in due:
            if deadline < now:
                del self.keys[key]
                self.changed(key, None)

    def is_full(self, key: bytes, value: bytes) -> bool:
        """Whether the quota does not take this SET: overwriting counts for bytes alone, and only where it grows."""
        kept = self.keys.get(key)
        if kept is None and self.max_keys and len(self.keys) >= self.max_keys:
            return True
        grown = len(value) - len(kept.value) if kept else RECORD_BYTES + len(key) + len(value)
        size = sum(RECORD_BYTES + len(name) + len(other.value) for name, other in self.keys.items())
        return self.max_bytes > 0 and grown > 0 and size + grown > self.max_bytes

    def fence_error(self, key: bytes, token: int | None) -> str | None:
        kept = self.keys.get(key)
        protecting = [floor for prefix, floor in self.floors.items() if key.startswith(prefix)]
        if kept is not None and kept.token is not None:
            protecting.append(kept.token)
        if not protecting:
            return None
        if token is None:
            return "a fencing token is required for this request"
        if token < max(protecting):
            return "the request fencing token is a lower version than the fencing token protecting the resource"
        return None


class EngineRequests(RequestSender):
    """Requests of a client that the engine of a machine answers at once."""

    def __init__(self, machine: StoreMachine) -> None:
        self.machine = machine

    async def call(
        self,
        args: list[bytes],
        fencing_token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: Mapping[str, str] | None = None,
        named: tuple[str, bytes] | None = None,
        extension: str | None = None,
        resend: bool = False,
    ) -> tuple[bytes, Hlc | None]:
        return self.machine.exchange(args)


def run(work: Coroutine[object, object, T]) -> T:
    """The result of a request of a client, which has its response at once."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the client waits for something else than the response")


async def collected(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


class StoreMachine(RuleBasedStateMachine):
    """Every rule sends one command to the engine and to the model and compares answer, changes and versions."""

    asked: ClassVar[set[Verb]] = set()
    asked_by_client: ClassVar[set[Verb]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.client = StateStoreClient(MqttClient("mqtt://127.0.0.1:1883", client_id="x"))
        self.client._requests = EngineRequests(self)
        self.engine = Engine(extensions=~Extension.NONE)
        self.engine.history = History(Hlc(0, 0, ""), 10_000, 1 << 30)
        self.model = Model()
        self.wall = START
        self.steady = START
        self.listing: tuple[set[bytes], list[bytes], bytes] | None = None
        """A listing under way: keys that were there all the time, what came so far, the next page's token."""
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(scan, "PAGE_LOOKED_AT", 1)

    def teardown(self) -> None:
        self.patches.undo()

    @initialize(max_keys=st.sampled_from([0, 0, 2]), max_bytes=st.sampled_from([0, 0, 2 * (RECORD_BYTES + 1) + 1]))
    def limit(self, max_keys: int, max_bytes: int) -> None:
        self.model.max_keys, self.model.max_bytes = max_keys, max_bytes
        self.engine.quotas = Quotas(max_keys, max_bytes)

    def ask(
        self, client: str, words: list[bytes], skew: int, token: int | None = None, prefix: bytes | None = None
    ) -> tuple[Answer, Hlc]:
        """Send one command; checks what holds for every answer."""
        command = parse(words, self.engine.extensions)
        assert isinstance(command, Command)
        timestamp = Hlc(self.wall + skew, 0, client)
        fence = None if token is None else b"%d:%d:n" % (START, token)
        context = Context(client, SDK, str(timestamp).encode(), fence, fence_prefix=prefix)
        return self.execute(command, context), timestamp

    def exchange(self, words: list[bytes]) -> tuple[bytes, Hlc | None]:
        """Send one command as a message of the client; return payload and version of the response."""
        publish = request(words, "x", b"1", Hlc(self.wall, 0, "x"), expiry_s=10)
        asked = read_request(publish, "x", self.wall, self.wall)
        assert isinstance(asked, StoreRequest)
        command = parse_payload(publish.payload, self.engine.extensions)
        assert isinstance(command, Command)
        self.asked_by_client.add(command.verb)
        answer = self.execute(command, asked)
        message = response("", answer_payload(answer, SDK), answer_properties(asked, answer, 10))
        version = message.properties.user_property("__ts")
        return message.payload, None if version is None else parse_version(version)

    def execute(self, command: Command, context: Context) -> Answer:
        self.asked.add(command.verb)
        self.model.told.clear()
        self.model.expire(self.steady)
        # The engine may leave the other keys to its timer; here the timer is always on time.
        changes = self.engine.tick(self.wall, self.steady)
        answer, more = self.engine.execute(command, context, self.wall, self.steady)
        self.check_changes(changes + more)
        return answer

    def check_changes(self, changes: list[Change]) -> None:
        self.changes = changes
        for change in changes:
            version = (change.version.wall_ms, change.version.counter)
            assert version > self.model.greatest
            self.model.greatest = version
            self.model.timeline.append((version, change.key, change.record.value if change.record else None))

    def told(self) -> list[tuple[str, bytes, bytes | None]]:
        return [
            (client, change.key, change.record.value if change.record is not None else None)
            for change in self.changes
            for client, _ in sorted(change.observers, key=lambda observer: observer[0])
        ]

    def refused_for_skew(self, answer: Answer, skew: int) -> bool:
        if skew <= 60_000:
            return False
        assert answer.error is StoreError.TIMESTAMP_TOO_FAR_AHEAD
        assert self.told() == self.model.told
        return True

    @rule(
        client=CLIENTS,
        key=KEYS,
        value=VALUES,
        token=TOKENS,
        ttl=TTLS,
        condition=st.sampled_from(["", "NX", "NEX"]),
        skew=SKEWS,
    )
    def set(
        self, client: str, key: bytes, value: bytes, token: int | None, ttl: int | None, condition: str, skew: int
    ) -> None:
        words = [b"SET", key, value]
        words += [condition.encode()] if condition else []
        words += [] if ttl is None else [b"PX", b"%d" % ttl]
        answer, timestamp = self.ask(client, words, skew, token)
        if self.refused_for_skew(answer, skew):
            return
        kept = self.model.keys.get(key)
        error = self.model.fence_error(key, token)
        if error is not None:
            assert answer.error == error
        elif kept is not None and (condition == "NX" or (condition == "NEX" and kept.value != value)):
            assert answer.kind is AnswerKind.NOT_MET
            assert answer.version is not None
            assert (answer.version.wall_ms, answer.version.counter) == kept.version
        elif self.model.is_full(key, value):
            assert answer.error is StoreError.QUOTA
        else:
            assert answer.kind is AnswerKind.OK
            assert answer.version is not None
            version = (answer.version.wall_ms, answer.version.counter)
            assert version > (timestamp.wall_ms, timestamp.counter)
            assert version == self.model.greatest
            tokens = [t for t in (kept.token if kept else None, token) if t is not None]
            deadline = None if ttl is None else self.steady + ttl
            self.model.keys[key] = Kept(value, version, max(tokens, default=None), deadline)
            self.model.changed(key, value)
        assert self.told() == self.model.told

    @rule(client=CLIENTS, key=KEYS, token=TOKENS, value=st.none() | VALUES, skew=SKEWS)
    def delete(self, client: str, key: bytes, token: int | None, value: bytes | None, skew: int) -> None:
        words = [b"DEL", key] if value is None else [b"VDEL", key, value]
        answer, timestamp = self.ask(client, words, skew, token)
        if self.refused_for_skew(answer, skew):
            return
        kept = self.model.keys.get(key)
        error = self.model.fence_error(key, token)
        if error is not None:
            assert answer.error == error
        elif kept is None:
            assert (answer.kind, answer.count, answer.version) == (AnswerKind.COUNT, 0, None)
        elif value is not None and kept.value != value:
            assert answer.kind is AnswerKind.NOT_MET
        else:
            assert (answer.kind, answer.count) == (AnswerKind.COUNT, 1)
            assert answer.version is not None
            assert (answer.version.wall_ms, answer.version.counter) > (timestamp.wall_ms, timestamp.counter)
            assert answer.previous is not None
            assert (answer.previous.wall_ms, answer.previous.counter) == kept.version
            del self.model.keys[key]
            self.model.changed(key, None)
        assert self.told() == self.model.told

    @rule(
        client=CLIENTS,
        writes=st.lists(
            st.tuples(st.sampled_from([b"SET", b"NX", b"NEX", b"DEL", b"VDEL"]), KEYS, VALUES, TTLS), min_size=1
        ),
        token=TOKENS,
        skew=SKEWS,
    )
    def write_many(
        self, client: str, writes: list[tuple[bytes, bytes, bytes, int | None]], token: int | None, skew: int
    ) -> None:
        words = [b"BATCH"]
        for verb, key, value, ttl in writes:
            one = [b"DEL", key] if verb == b"DEL" else [b"SET", key, value]
            if verb == b"VDEL":
                one = [b"VDEL", key, value]
            elif verb != b"DEL":
                one += [] if verb == b"SET" else [verb]
                one += [] if ttl is None else [b"PX", b"%d" % ttl]
            words += [b"%d" % len(one), *one]
        answer, timestamp = self.ask(client, words, skew, token)
        if self.refused_for_skew(answer, skew):
            return
        # What expired has no writer.
        made = [change for change in self.changes if change.writer]
        versions = iter([(change.version.wall_ms, change.version.counter) for change in made])
        expected = b"".join([self.comes_to(*write, token, versions) for write in writes])
        assert answer.value == b"*%d\r\n" % len(writes) + expected
        assert next(versions, None) is None
        assert all(change.version > timestamp for change in made)
        assert answer.version == (made[-1].version if made else None)
        assert self.told() == self.model.told

    def comes_to(
        self,
        verb: bytes,
        key: bytes,
        value: bytes,
        ttl: int | None,
        token: int | None,
        versions: Iterator[tuple[int, int]],
    ) -> bytes:
        """What one write of a batch comes to, taking its version from the changes that the engine made."""
        kept = self.model.keys.get(key)
        error = self.model.fence_error(key, token)
        if error is not None:
            return b"-ERR %b\r\n" % error.encode()
        if verb in (b"DEL", b"VDEL"):
            if kept is None:
                return b":0\r\n"
            if verb == b"VDEL" and kept.value != value:
                return b":-1\r\n"
            next(versions)
            del self.model.keys[key]
            self.model.changed(key, None)
            return b":1\r\n"
        if kept is not None and (verb == b"NX" or (verb == b"NEX" and kept.value != value)):
            return b":-1\r\n"
        if self.model.is_full(key, value):
            return b"-ERR the quota has been exceeded\r\n"
        tokens = [t for t in (kept.token if kept else None, token) if t is not None]
        deadline = None if ttl is None else self.steady + ttl
        self.model.keys[key] = Kept(value, next(versions), max(tokens, default=None), deadline)
        self.model.changed(key, value)
        return b"+OK\r\n"

    @rule(client=CLIENTS, key=KEYS, skew=SKEWS)
    def get(self, client: str, key: bytes, skew: int) -> None:
        answer, _ = self.ask(client, [b"GET", key], skew)
        if self.refused_for_skew(answer, skew):
            return
        kept = self.model.keys.get(key)
        if kept is None:
            assert (answer.kind, answer.version) == (AnswerKind.MISSING, None)
        else:
            assert (answer.kind, answer.value) == (AnswerKind.VALUE, kept.value)
            assert answer.version is not None
            assert (answer.version.wall_ms, answer.version.counter) == kept.version
        assert self.told() == self.model.told

    @rule(client=CLIENTS, prefix=PREFIXES, token=st.integers(0, 2), value=VALUES)
    def raise_floor(self, client: str, prefix: bytes, token: int, value: bytes) -> None:
        answer, _ = self.ask(client, [b"SET", b"run", value], 0, token, prefix)
        error = self.model.fence_error(b"run", token)
        if error is None and self.model.floors.get(prefix, 0) > token:
            error = "the request fencing token is a lower version than the fencing token protecting the resource"
        if error is None and self.model.is_full(b"run", value):
            error = StoreError.QUOTA
        if error is not None:
            assert answer.error == error
            return
        assert answer.version is not None
        kept = self.model.keys.get(b"run")
        tokens = [t for t in (kept.token if kept else None, token) if t is not None]
        version = (answer.version.wall_ms, answer.version.counter)
        self.model.keys[b"run"] = Kept(value, version, max(tokens), None)
        self.model.floors[prefix] = token
        self.model.changed(b"run", value)
        assert self.told() == self.model.told

    @rule(client=CLIENTS, key=KEYS, back=st.integers(0, 30))
    def get_as_of(self, client: str, key: bytes, back: int) -> None:
        timeline = self.model.timeline
        if not timeline:
            return
        at = timeline[max(0, len(timeline) - 1 - back)][0]
        answer, _ = self.ask(client, [b"GET", key, b"ASOF", b"%d:%d:n" % at], 0)
        kept = self.model.keys.get(key)
        if at < self.model.known_from and (kept is None or kept.version > at):
            assert answer.error is StoreError.HISTORY
            return
        values = [value for version, changed, value in self.model.timeline if changed == key and version <= at]
        expected = values[-1] if values else None
        assert (answer.value if answer.kind is AnswerKind.VALUE else None) == expected
        assert answer.error is None

    @rule()
    def read_all(self) -> None:
        names = (b"a", b"b", b"run")
        snapshot, values = run(self.client.get_many(names)), run(self.client.get_values(names))
        entries = {
            key: None if kept is None else Entry(kept.value, Hlc(*kept.version, "StateStore"))
            for key in names
            for kept in (self.model.keys.get(key),)
        }
        assert snapshot.entries == entries
        assert snapshot.version is not None
        assert self.model.greatest <= (snapshot.version.wall_ms, snapshot.version.counter)
        assert {key: run(self.client.get(key)) for key in names} == entries
        assert values == {key: None if entry is None else entry.value for key, entry in entries.items()}

    def page(self, client: str, pattern: bytes, token: bytes | None) -> tuple[list[bytes], bytes | None]:
        answer, _ = self.ask(client, [b"SCAN", pattern] + ([token] if token else []), 0)
        assert answer.kind is AnswerKind.PAYLOAD
        return decode_page(answer.value)

    @rule(pattern=st.sampled_from(sorted(PATTERNS)))
    def list_all(self, pattern: bytes) -> None:
        keys = run(collected(self.client.scan(pattern)))
        assert sorted(keys) == sorted(PATTERNS[pattern] & set(self.model.keys))

    @rule(client=CLIENTS)
    def list_a_page(self, client: str) -> None:
        """A listing while keys come and go: what stays comes exactly once, and nothing comes twice."""
        if self.listing is None:
            keys, token = self.page(client, b"*", None)
            stable, seen = set(self.model.keys), keys
        else:
            stable, seen, before = self.listing
            keys, token = self.page(client, b"*", before)
            seen += keys
        assert len(seen) == len(set(seen))
        self.listing = None if token is None else (stable, seen, token)
        if token is None:
            assert stable - self.model.removed <= set(seen)
            assert set(keys) <= set(self.model.keys)

    @rule(key=KEYS)
    def time_left(self, key: bytes) -> None:
        expiry = run(self.client.expiry(key))
        kept = self.model.keys.get(key)
        left = None if kept is None or kept.deadline is None else kept.deadline - self.steady
        assert expiry == Expiry(kept is not None, left)

    def resumes(self, answer: Answer, at: tuple[int, int], prefix: bytes, *, exact: bool) -> bool:
        """Whether the observation goes on after ``at``; checks what it was told of the time since."""
        if at < self.model.known_from:
            assert answer.error is StoreError.HISTORY
            return False
        assert answer.kind is AnswerKind.OK
        missed = [
            (
                (change.version.wall_ms, change.version.counter),
                change.key,
                change.record.value if change.record else None,
            )
            for change in answer.missed or ()
        ]
        assert missed == [
            (version, key, value)
            for version, key, value in self.model.timeline
            if version > at and (key == prefix if exact else key.startswith(prefix))
        ]
        return True

    @rule(client=CLIENTS, key=KEYS, prefix=PREFIXES, exact=st.booleans(), back=st.integers(0, 10))
    def resume(self, client: str, key: bytes, prefix: bytes, exact: bool, back: int) -> None:
        timeline = self.model.timeline
        if not timeline:
            return
        at = timeline[max(0, len(timeline) - 1 - back)][0]
        words = [b"KEYNOTIFY", key] if exact else [b"KEYNOTIFY", prefix, b"PREFIX"]
        answer, _ = self.ask(client, [*words, b"AFTER", b"%d:%d:n" % at], 0)
        if self.resumes(answer, at, key if exact else prefix, exact=exact):
            watchers = self.model.watchers if exact else self.model.prefix_watchers
            watchers.setdefault(key if exact else prefix, set()).add(client)

    @rule(client=CLIENTS, prefix=PREFIXES, stop=st.booleans())
    def observe_prefix(self, client: str, prefix: bytes, stop: bool) -> None:
        answer, _ = self.ask(client, [b"KEYNOTIFY", prefix, b"PREFIX"] + [b"STOP"] * stop, 0)
        watchers = self.model.prefix_watchers.setdefault(prefix, set())
        assert answer.kind is (AnswerKind.COUNT if stop and client not in watchers else AnswerKind.OK)
        if stop:
            watchers.discard(client)
        else:
            watchers.add(client)

    @rule(client=CLIENTS, key=KEYS, stop=st.booleans())
    def observe(self, client: str, key: bytes, stop: bool) -> None:
        answer, _ = self.ask(client, [b"KEYNOTIFY", key] + [b"STOP"] * stop, 0)
        watchers = self.model.watchers.setdefault(key, set())
        assert answer.kind is (AnswerKind.COUNT if stop and client not in watchers else AnswerKind.OK)
        if stop:
            watchers.discard(client)
        else:
            watchers.add(client)

    @rule(client=CLIENTS)
    def disconnect(self, client: str) -> None:
        self.engine.forget(client)
        for watchers in (*self.model.watchers.values(), *self.model.prefix_watchers.values()):
            watchers.discard(client)

    @rule(wall=st.integers(-50, 50), steady=st.integers(0, 20))
    def pass_time(self, wall: int, steady: int) -> None:
        self.wall += wall
        self.steady += steady

    @rule()
    def timer(self) -> None:
        self.model.told.clear()
        deadline = self.engine.next_deadline()
        deadlines = [kept.deadline for kept in self.model.keys.values() if kept.deadline is not None]
        assert deadline == (min(deadlines) + 1 if deadlines else None)
        self.model.expire(self.steady)
        self.check_changes(self.engine.tick(self.wall, self.steady))
        assert self.told() == self.model.told

    @rule()
    def restart(self) -> None:
        """Everything but the observations lives on; the clock does not go back."""
        records = list(self.engine._records.values())
        clock, floors = self.engine.clock, list(self.engine.fences.floors.items())
        self.engine = Engine(extensions=~Extension.NONE, max_keys=self.model.max_keys, max_bytes=self.model.max_bytes)
        self.engine.restore([replace_key(record) for record in records], clock)
        self.engine.fences.restore(floors)
        # The log was off meanwhile: what was before is not known.
        self.engine.history = History(clock, 10_000, 1 << 30)
        self.model.known_from = (clock.wall_ms, clock.counter)
        self.model.watchers.clear()
        self.model.prefix_watchers.clear()

    @invariant()
    def same_number_of_keys(self) -> None:
        assert self.engine.keys == len(self.model.keys)
        observed = (*self.model.watchers.values(), *self.model.prefix_watchers.values())
        assert self.engine.observations == sum(len(watchers) for watchers in observed)

    @invariant()
    def what_a_listing_may_miss(self) -> None:
        if self.listing is not None:
            stable, seen, token = self.listing
            self.listing = (stable - self.model.removed, seen, token)
        self.model.removed.clear()


def replace_key(record: Record) -> Record:
    """A record as it comes from the disk: equal, not the same."""
    return Record(bytes(record.key), bytes(record.value), record.version, record.fence, record.expires_at)


def test_store() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=80, stateful_step_count=50))
    missing = set(Verb) - StoreMachine.asked
    assert not missing, f"StoreMachine in {__file__} has no rule that sends {', '.join(sorted(missing))}: write one"
    # An observation needs a connection: the tests of the client have one.
    reads = {verb for verb, spec in COMMANDS.items() if Access.WRITE not in spec.access} - {Verb.KEYNOTIFY}
    missing = reads - StoreMachine.asked_by_client
    assert not missing, f"no rule of StoreMachine in {__file__} calls the client's {', '.join(sorted(missing))}"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_store_for_longer() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=2000, stateful_step_count=60))

"""The engine alone: every rule of the commands, versions, fences, expiry and observations."""

from __future__ import annotations

import sys

import pytest

from penstock.statestore.codec.commands import COMMANDS, Access, Command, Extension, Verb, parse
from penstock.statestore.codec.dialects import PUBLISHED, SDK
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine import requests, scan
from penstock.statestore.engine.record import RECORD_BYTES, Change, Record, decode_record, encode_record
from penstock.statestore.engine.requests import Answer, AnswerKind, Context
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import MAX_COUNTER, Hlc

NOW = 1_700_000_000_000


class Store:
    """An engine with a hand-driven clock; requests are written as words."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self.now = NOW
        self.steady = NOW
        self.changes: list[Change] = []

    def ask(self, words: str, *, ts: str | None = "now", ft: Hlc | str | None = None, client: str = "c") -> Answer:
        command = parse([word.encode() for word in words.split(" ")])
        assert isinstance(command, Command)
        stamp = f"{self.now}:0:{client}" if ts == "now" else ts
        context = Context(
            client, SDK, None if stamp is None else stamp.encode(), None if ft is None else str(ft).encode()
        )
        answer, changes = self.engine.execute(command, context, self.now, self.steady)
        self.changes += changes
        return answer

    def version(self, words: str, *, ft: Hlc | str | None = None, ts: str | None = "now") -> Hlc:
        answer = self.ask(words, ft=ft, ts=ts)
        assert answer.kind in (AnswerKind.OK, AnswerKind.VALUE)
        assert answer.version is not None
        return answer.version

    def error(self, words: str, *, ft: Hlc | str | None = None, ts: str | None = "now") -> StoreError | None:
        before = self.engine.clock
        answer = self.ask(words, ft=ft, ts=ts)
        if answer.error is not None:
            assert self.engine.clock == before
        return answer.error

    def pass_ms(self, ms: int) -> list[Change]:
        self.now += ms
        self.steady += ms
        ticked = self.engine.tick(self.now, self.steady)
        self.changes += ticked
        return ticked


def pages(answer: bytes) -> tuple[list[bytes], bytes | None]:
    """Keys and token in an answer to SCAN; keys and tokens of these tests hold no line ends."""
    outer, _, rest = answer.partition(b"\r\n")
    count, _, rest = rest.partition(b"\r\n")
    found: list[bytes] = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size[1:])
        found.append(rest[:length])
        rest = rest[length + 2 :]
    number = int(count[1:])
    return found[:number], found[number] if outer == b"*2" else None


@pytest.fixture
def store() -> Store:
    return Store()


def test_set_get_delete(store: Store) -> None:
    assert store.ask("GET k").kind is AnswerKind.MISSING
    assert store.ask("GET k").version is None
    version = store.version("SET k v")
    found = store.ask("GET k")
    assert (found.kind, found.value, found.version) == (AnswerKind.VALUE, b"v", version)
    deleted = store.ask("DEL k")
    assert (deleted.kind, deleted.count, deleted.previous) == (AnswerKind.COUNT, 1, version)
    assert deleted.version is not None
    assert deleted.version > version
    again = store.ask("DEL k")
    assert (again.count, again.version, again.previous) == (0, None, None)
    assert store.version("SET k v") > deleted.version


def test_value_delete(store: Store) -> None:
    assert store.ask("VDEL k v").count == 0
    store.ask("SET k v")
    assert store.ask("VDEL k w").kind is AnswerKind.NOT_MET
    assert store.ask("GET k").value == b"v"
    assert store.ask("VDEL k v").count == 1
    assert store.ask("GET k").kind is AnswerKind.MISSING


def test_nx_and_nex(store: Store) -> None:
    first = store.version("SET k v NX")
    refused = store.ask("SET k w NX")
    assert (refused.kind, refused.version) == (AnswerKind.NOT_MET, first)
    assert store.ask("SET k w NEX").kind is AnswerKind.NOT_MET
    second = store.version("SET k v NEX")
    third = store.version("SET k v NEX")
    assert first < second < third
    assert store.version("SET k w NEX v") > third
    assert store.ask("GET k").value == b"w"
    assert [change.version for change in store.changes] == sorted(change.version for change in store.changes)
    assert len(store.changes) == 4


def test_version_is_greater_than_the_request_and_than_every_earlier_one(store: Store) -> None:
    assert store.version("SET k v", ts=f"{NOW}:0:StateStore") == Hlc(NOW, 1, "StateStore")
    assert store.version("SET k v", ts=f"{NOW}:1:StateStore") == Hlc(NOW + 1, 1, "StateStore")
    assert store.version("SET k v", ts=f"{NOW + 60_000}:9:c") == Hlc(NOW + 60_000, 10, "StateStore")
    assert store.version("SET k v", ts="0:0:c") == Hlc(NOW + 60_000, 11, "StateStore")
    store.now -= 3_600_000
    assert store.version("SET k v", ts="0:0:c") == Hlc(NOW + 60_000, 12, "StateStore")


def test_a_counter_at_its_end_moves_the_wall_clock(store: Store) -> None:
    assert store.version("SET k v", ts=f"{NOW}:{MAX_COUNTER}:c") == Hlc(NOW + 1, 1, "StateStore")
    assert store.version("SET k v", ts=f"{NOW + 50}:{2**64 - 1}:c") == Hlc(NOW + 51, 1, "StateStore")


def test_skew_of_60_000_ms_is_accepted_and_60_001_refused(store: Store) -> None:
    late = f"{NOW + 60_001}:0:c"
    for words in ("SET k v", "GET k", "DEL k", "VDEL k v", "KEYNOTIFY k"):
        assert store.error(words, ts=late) is StoreError.TIMESTAMP_TOO_FAR_AHEAD
    assert store.version("SET k v", ts=f"{NOW + 60_000}:0:c").wall_ms == NOW + 60_000
    for words in ("SET f v", "DEL f", "VDEL f v"):
        assert store.error(words, ft=late) is StoreError.FENCE_TOO_FAR_AHEAD
    assert store.error("SET f v", ft=f"{NOW + 60_000}:0:c") is None


def test_timestamp_is_needed_by_set_alone(store: Store) -> None:
    assert store.error("SET k v", ts=None) is StoreError.TIMESTAMP_MISSING
    for words in ("GET k", "DEL k", "VDEL k v", "KEYNOTIFY k", "KEYNOTIFY k STOP"):
        assert store.error(words, ts=None) is None


@pytest.mark.parametrize("text", ["", "x", "1:2", "-1:0:n", f"{2**64}:0:n", "1:2:n:m", "1:2:"])
def test_malformed_timestamp_and_token(store: Store, text: str) -> None:
    assert store.error("SET k v", ts=text) is StoreError.TIMESTAMP_MALFORMED
    assert store.error("GET k", ts=text) is StoreError.TIMESTAMP_MALFORMED
    assert store.error("SET k v", ft=text) is StoreError.TIMESTAMP_MALFORMED
    assert store.error("DEL missing", ft=text) is StoreError.TIMESTAMP_MALFORMED
    # GET and KEYNOTIFY take no token, so theirs is not looked at.
    assert store.error("GET k", ft=text) is None
    assert store.changes == []


def test_a_read_moves_the_clock_past_its_timestamp(store: Store) -> None:
    store.ask("GET k", ts=f"{NOW + 50_000}:7:c")
    assert store.version("SET k v") == Hlc(NOW + 50_000, 8, "StateStore")


def test_fencing(store: Store) -> None:
    low, middle, high = (Hlc(NOW, n, "StateStore") for n in (1, 2, 3))
    store.version("SET k v", ft=middle)
    for words in ("SET k w", "SET k w NX", "DEL k", "VDEL k v", "VDEL k other"):
        assert store.error(words) is StoreError.FENCE_REQUIRED
        assert store.error(words, ft=low) is StoreError.FENCE_LOWER
    assert store.ask("GET k").value == b"v"
    assert store.error("SET k v", ft=middle) is None
    assert store.error("SET k v", ft=high) is None
    assert store.error("SET k v", ft=middle) is StoreError.FENCE_LOWER
    assert store.error("SET k v", ft=Hlc(NOW, 3, "Z")) is None
    assert store.error("VDEL k v", ft=high) is StoreError.FENCE_LOWER
    assert store.ask("VDEL k v", ft=Hlc(NOW, 3, "Z")).count == 1
    # The fence is gone with the key.
    assert store.error("SET k v") is None


def test_a_refused_condition_leaves_the_fence_alone(store: Store) -> None:
    store.version("SET k v", ft=Hlc(NOW, 1, "n"))
    assert store.ask("SET k w NX", ft=Hlc(NOW, 9, "n")).kind is AnswerKind.NOT_MET
    assert store.error("SET k v", ft=Hlc(NOW, 2, "n")) is None


def test_a_token_on_an_unfenced_key(store: Store) -> None:
    token = Hlc(NOW, 1, "n")
    assert store.ask("DEL k", ft=token).count == 0
    store.ask("SET k v")
    assert store.ask("DEL k", ft=token).count == 1
    store.ask("SET k v")
    store.ask("SET k v", ft=token)
    assert store.error("SET k v") is StoreError.FENCE_REQUIRED


def test_an_older_set_without_px_removes_the_expiry(store: Store) -> None:
    store.ask("SET k v PX 100")
    assert store.engine.next_deadline() == NOW + 101
    store.ask("SET k v")
    assert store.engine.next_deadline() is None
    assert store.pass_ms(1000) == []
    assert store.ask("GET k").value == b"v"


def test_a_refused_set_leaves_the_expiry(store: Store) -> None:
    store.ask("SET k v PX 100")
    store.ask("SET k w NX PX 5000")
    assert store.engine.next_deadline() == NOW + 101


def test_expiry_to_the_millisecond_and_exactly_once(store: Store) -> None:
    store.ask("SET k v PX 100", ts="0:0:c")
    store.ask("KEYNOTIFY k", client="watcher")
    assert store.pass_ms(100) == []
    assert store.ask("GET k").value == b"v"
    (expired,) = store.pass_ms(1)
    assert (expired.key, expired.record, expired.observers) == (b"k", None, (("watcher", SDK),))
    assert expired.version > store.changes[0].version
    assert store.ask("GET k").kind is AnswerKind.MISSING
    assert store.pass_ms(1000) == []
    assert store.engine.expired == 1


def test_renewal_one_millisecond_before_expiry_holds(store: Store) -> None:
    store.ask("SET k v NEX PX 100")
    store.pass_ms(100)
    store.ask("SET k v NEX PX 100")
    assert store.pass_ms(100) == []
    assert len(store.pass_ms(1)) == 1


def test_a_request_after_the_deadline_expires_its_key_first(store: Store) -> None:
    store.ask("KEYNOTIFY k")
    store.ask("SET k v PX 100", ft=f"{NOW}:0:n")
    store.now, store.steady = NOW + 101, NOW + 101
    store.changes.clear()
    # The fence is gone with the expired key, and NX applies.
    assert store.ask("SET k w NX").kind is AnswerKind.OK
    assert [change.record and change.record.value for change in store.changes] == [None, b"w"]
    assert store.changes[0].version < store.changes[1].version
    assert store.engine.tick(store.now, store.steady) == []


def test_expiry_follows_the_steady_clock(store: Store) -> None:
    store.ask("SET k v PX 100")
    store.now += 3_600_000
    assert store.engine.tick(store.now, store.steady) == []
    store.now -= 7_200_000
    assert len(store.engine.tick(store.now, store.steady + 101)) == 1


def test_tick_takes_the_earliest_first_and_no_more_than_asked(store: Store) -> None:
    for n in (3, 1, 2):
        store.ask(f"SET k{n} v PX {n}")
    store.now += 10
    store.steady += 10
    assert [change.key for change in store.engine.tick(store.now, store.steady, limit=2)] == [b"k1", b"k2"]
    assert store.engine.next_deadline() == NOW + 4


def test_deadlines_of_renewed_keys_do_not_pile_up(store: Store) -> None:
    for n in range(5000):
        store.ask(f"SET k v PX {n + 1}")
    assert len(store.engine.expiries._heap) < 1100
    assert store.engine.next_deadline() == NOW + 5001


def test_observers_are_notified_of_changes_only(store: Store) -> None:
    assert store.ask("KEYNOTIFY k", client="a").kind is AnswerKind.OK
    assert store.ask("KEYNOTIFY k", client="a").kind is AnswerKind.OK
    store.ask("KEYNOTIFY k", client="b")
    for words in ("SET k v", "SET k v NX", "SET k v NEX", "VDEL k w", "DEL missing", "GET k", "DEL k", "DEL k"):
        store.ask(words, client="a")
    told = [(change.record.value if change.record else None, change.observers) for change in store.changes]
    both = (("a", SDK), ("b", SDK))
    assert told == [(b"v", both), (b"v", both), (None, both)]


def test_stop(store: Store) -> None:
    assert store.ask("KEYNOTIFY k STOP").count == 0
    store.ask("KEYNOTIFY k")
    assert store.ask("KEYNOTIFY k STOP", client="other").count == 0
    assert store.ask("KEYNOTIFY k STOP").kind is AnswerKind.OK
    assert store.ask("KEYNOTIFY k STOP").kind is AnswerKind.COUNT
    store.ask("SET k v")
    assert store.changes[0].observers == ()
    assert store.engine.observations == 0


def test_wildcards_in_a_key_are_plain_bytes(store: Store) -> None:
    store.ask("KEYNOTIFY *")
    store.ask("SET k v")
    store.ask("SET * v")
    assert [bool(change.observers) for change in store.changes] == [False, True]


def test_observations_end_with_the_connection(store: Store) -> None:
    store.ask("KEYNOTIFY k1", client="a")
    store.ask("KEYNOTIFY k2", client="a")
    store.ask("KEYNOTIFY k1", client="b")
    store.engine.forget("a")
    store.engine.forget("a")
    assert store.engine.observations == 1
    assert not store.engine.observes("a", b"k1")
    assert store.engine.observes("b", b"k1")


def test_an_observation_keeps_the_dialect_it_was_made_in(store: Store) -> None:
    command = parse([b"KEYNOTIFY", b"k"])
    assert isinstance(command, Command)
    store.engine.execute(command, Context("a", PUBLISHED), NOW, NOW)
    store.ask("SET k v")
    assert store.changes[0].observers == (("a", PUBLISHED),)


def test_observations_of_one_client_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.statestore.engine.observers.MAX_OBSERVATIONS", 2)
    assert store.error("KEYNOTIFY a") is None
    assert store.error("KEYNOTIFY b") is None
    assert store.error("KEYNOTIFY c") is StoreError.QUOTA
    assert store.error("KEYNOTIFY a") is None


def test_quota() -> None:
    store = Store(Engine(max_keys=2))
    store.ask("SET a v PX 100")
    store.ask("SET b v")
    assert store.error("SET c v") is StoreError.QUOTA
    assert store.error("SET b w") is None
    assert store.ask("SET b w NX").kind is AnswerKind.NOT_MET
    # A key past its expiry does not count, whether or not anybody has looked at it.
    store.now += 101
    store.steady += 101
    assert store.error("SET c v") is None
    assert store.engine.keys == 2
    assert [change.key for change in store.changes[-2:]] == [b"a", b"c"]


def test_quota_of_bytes_counts_what_a_record_takes_and_only_what_grows() -> None:
    store = Store(Engine(max_bytes=2 * (RECORD_BYTES + 1) + 3))
    assert store.error("SET a 12") is None
    assert store.error("SET b 1") is None
    assert store.error("SET a 123") is StoreError.QUOTA
    assert store.error("SET c 1") is StoreError.QUOTA
    assert store.error("SET a 21") is None
    assert store.error("SET a 2") is None
    assert store.error("SET b 12") is None
    # The condition is looked at first.
    assert store.ask("SET b 12345 NX").kind is AnswerKind.NOT_MET


def test_the_higher_of_key_fence_and_prefix_floor_applies() -> None:
    store = Store(Engine(extensions=Extension.PREFIX_FENCE))
    store.ask("SET out/k v", ft=f"{NOW}:1:n")
    command = parse([b"SET", b"lock", b"v"], Extension.PREFIX_FENCE)
    assert isinstance(command, Command)
    context = Context("c", SDK, b"%d:0:c" % NOW, b"%d:3:n" % NOW, fence_prefix=b"out/")
    answer, _ = store.engine.execute(command, context, NOW, NOW)
    assert answer.kind is AnswerKind.OK
    assert store.error("SET out/k v", ft=f"{NOW}:2:n") is StoreError.FENCE_LOWER
    assert store.error("SET out/new v", ft=f"{NOW}:2:n") is StoreError.FENCE_LOWER
    assert store.error("DEL out/none") is StoreError.FENCE_REQUIRED
    assert store.error("SET out/k v", ft=f"{NOW}:5:n") is None
    assert store.error("SET out/k v", ft=f"{NOW}:4:n") is StoreError.FENCE_LOWER
    assert store.error("SET out/new v", ft=f"{NOW}:4:n") is None


def test_room_for_a_floor_is_looked_at_after_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_PREFIXES", 0)
    store = Store(Engine(extensions=Extension.PREFIX_FENCE))
    store.ask("SET lock v")
    context = Context("c", SDK, b"%d:0:c" % NOW, b"%d:3:n" % NOW, fence_prefix=b"out/")

    def ask(*words: bytes) -> Answer:
        command = parse(list(words), Extension.PREFIX_FENCE)
        assert isinstance(command, Command)
        return store.engine.execute(command, context, NOW, NOW)[0]

    assert ask(b"SET", b"lock", b"w", b"NX").kind is AnswerKind.NOT_MET
    assert ask(b"SET", b"lock", b"w", b"NEX", b"w").kind is AnswerKind.NOT_MET
    assert ask(b"SET", b"lock", b"w").error is StoreError.QUOTA


def test_pages_of_a_scan_never_name_a_key_that_the_client_may_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PAGE_LOOKED_AT", 3)

    def may(context: Context, access: Access, key: bytes) -> bool:
        return context.client_id == "owner" or key.startswith(b"open")

    store = Store(Engine(authorise=may, secret=b"s" * 16))
    for n in range(20):
        store.ask(f"SET hidden{n:02} v", client="owner")
        store.ask(f"SET open{n:02} v", client="owner")
    command = parse([b"SCAN", b"*"])
    seen = b""
    for _ in range(40):
        assert isinstance(command, Command)
        answer, _ = store.engine.execute(command, Context("c", SDK), store.now, store.steady)
        page, token = pages(answer.value)
        assert b"hidden" not in answer.value
        seen += b"".join(page)
        if token is None:
            break
        command = parse([b"SCAN", b"*", token])
    assert seen == b"".join(b"open%02d" % n for n in range(20))


def test_authorisation_comes_before_the_timestamp() -> None:
    asked: list[tuple[str, Access, bytes]] = []

    def authorise(context: Context, access: Access, key: bytes) -> bool:
        assert context.principal is None
        asked.append((context.client_id, access, key))
        return access is Access.READ

    store = Store(Engine(authorise=authorise))
    assert store.error("SET k v", ts=None) is StoreError.NOT_AUTHORIZED
    assert store.error("GET k", ts="nonsense") is StoreError.TIMESTAMP_MALFORMED
    assert asked == [("c", Access.WRITE, b"k"), ("c", Access.READ, b"k")]


@pytest.mark.parametrize(
    ("words", "plain", "strict"),
    [
        ("SET k v", Access.WRITE, Access.WRITE),
        ("SET k v PX 5", Access.WRITE, Access.WRITE),
        ("SET k v NX", Access.WRITE, Access.WRITE | Access.READ),
        ("SET k v NEX", Access.WRITE, Access.WRITE | Access.READ),
        ("DEL k", Access.WRITE, Access.WRITE),
        ("VDEL k v", Access.WRITE, Access.WRITE | Access.READ),
        ("GET k", Access.READ, Access.READ),
        ("KEYNOTIFY k", Access.READ, Access.READ),
    ],
)
def test_strict_read_also_asks_for_read_where_the_answer_tells_of_the_value(
    words: str, plain: Access, strict: Access
) -> None:
    for strict_read, expected in ((False, plain), (True, strict)):
        asked: list[Access] = []

        def authorise(_: Context, access: Access, __: bytes, asked: list[Access] = asked) -> bool:
            asked.append(access)
            return False

        store = Store(Engine(authorise=authorise, strict_read=strict_read))
        assert store.error(words) is StoreError.NOT_AUTHORIZED
        assert asked == [expected]


@pytest.mark.parametrize(
    ("words", "prefix", "reported"),
    [
        ("GET a", None, []),
        ("SET secret v", None, [(Verb.SET, Access.WRITE, b"secret")]),
        ("VDEL secret v", None, [(Verb.VDEL, Access.READ | Access.WRITE, b"secret")]),
        ("MGET a secret b", None, [(Verb.MGET, Access.READ, b"secret")]),
        ("SET s v", b"s", [(Verb.SET, Access.WRITE, b"s")]),
        ("SET secret v", b"se", [(Verb.SET, Access.WRITE, b"secret")]),
        ("SCAN *", None, []),
    ],
)
def test_a_denied_command_is_reported_with_the_first_key_that_is_not_permitted(
    words: str, prefix: bytes | None, reported: list[tuple[Verb, Access, bytes]]
) -> None:
    found: list[tuple[Verb, Access, bytes]] = []
    engine = Engine(
        extensions=~Extension.NONE,
        secret=bytes(16),
        authorise=lambda _, __, key: key not in (b"secret", b"s"),
        denied=lambda _, verb, access, key: found.append((verb, access, key)),
        strict_read=True,
    )
    command = parse([word.encode() for word in words.split()], ~Extension.NONE)
    assert isinstance(command, Command)
    context = Context("c", SDK, b"%d:0:c" % NOW, b"%d:3:n" % NOW if prefix else None, fence_prefix=prefix)
    answer, _ = engine.execute(command, context, NOW, NOW)
    assert found == reported
    assert (answer.error is StoreError.NOT_AUTHORIZED) == bool(reported)


PRECEDENCE = [
    # What is wrong with the request, from the last rule to the first; each line adds the next error to be found.
    ("SET full v NX", "now", None, StoreError.QUOTA),
    ("SET fenced v NX", "now", f"{NOW - 1}:0:n", StoreError.FENCE_LOWER),
    ("SET fenced v NX", "now", None, StoreError.FENCE_REQUIRED),
    ("SET fenced v NX", "now", f"{NOW + 60_001}:0:n", StoreError.FENCE_TOO_FAR_AHEAD),
    ("SET fenced v NX", "now", "x", StoreError.TIMESTAMP_MALFORMED),
    ("SET fenced v NX", f"{NOW + 60_001}:0:c", "x", StoreError.TIMESTAMP_TOO_FAR_AHEAD),
    ("SET fenced v NX", "x", f"{NOW + 60_001}:0:n", StoreError.TIMESTAMP_MALFORMED),
    ("SET fenced v NX", None, f"{NOW + 60_001}:0:n", StoreError.TIMESTAMP_MISSING),
]


@pytest.mark.parametrize(("words", "ts", "ft", "error"), PRECEDENCE, ids=str)
def test_the_first_of_several_errors(words: str, ts: str | None, ft: str | None, error: StoreError) -> None:
    store = Store(Engine(max_keys=1))
    store.ask("SET fenced v", ft=f"{NOW}:0:n")
    assert store.error(words, ts=ts, ft=ft) is error
    assert len(store.changes) == 1


def test_restore_takes_the_greatest_version_on_record() -> None:
    records = [
        Record(b"a", b"1", Hlc(NOW + 5, 3, "StateStore")),
        Record(b"b", b"2", Hlc(NOW, 9, "StateStore"), Hlc(NOW, 1, "n"), NOW + 50),
    ]
    store = Store()
    store.engine.restore(records, Hlc(NOW + 5, 7, ""))
    assert store.version("SET c v", ts="0:0:c") == Hlc(NOW + 6, 1, "StateStore")
    assert store.ask("GET a").value == b"1"
    assert store.error("SET b v") is StoreError.FENCE_REQUIRED
    assert [change.key for change in store.pass_ms(51)] == [b"b"]
    without = Engine()
    without.restore(records, None)
    assert without.clock == Hlc(NOW + 5, 3, "StateStore")


def test_without_disk_space_only_writes_that_need_some_are_refused() -> None:
    store = Store()
    store.ask("SET a 12 PX 1000")
    store.ask("SET b 12")
    store.engine.out_of_space = True
    assert store.error("SET c 1") is StoreError.QUOTA
    assert store.error("SET a 123") is StoreError.QUOTA
    # A lease is renewed, keys are deleted and expire.
    assert store.ask("SET a 34 PX 1000").kind is AnswerKind.OK
    assert store.ask("DEL b").count == 1
    assert [change.key for change in store.pass_ms(1001)] == [b"a"]
    store.engine.out_of_space = False
    assert store.ask("SET c 1").kind is AnswerKind.OK
    # Where every change is logged, one of the same size needs space too.
    store.engine.out_of_space = store.engine.logs_changes = True
    assert store.error("SET c 2") is StoreError.QUOTA
    assert store.ask("DEL c").count == 1


def owned(store: Store, owner: str, words: str) -> StoreError | None:
    """The error with which a SET or DEL of a client of ``owner`` is answered."""
    command = parse([word.encode() for word in words.split(" ")])
    assert isinstance(command, Command)
    context = Context("c", SDK, b"%d:0:c" % store.now)
    context.owner = owner
    return store.engine.execute(command, context, store.now, store.steady)[0].error


def test_one_principal_has_a_share_of_the_keys_and_others_the_rest() -> None:
    store = Store(Engine(max_keys=4, share=50))
    assert [owned(store, "user:a", f"SET a{n} v") for n in range(3)] == [None, None, StoreError.QUOTA]
    assert [owned(store, "", f"SET b{n} v") for n in range(3)] == [None, None, StoreError.QUOTA]
    assert (store.engine.refused_share, store.engine.refused_quota) == (1, 1), "the second time the store was full"
    assert store.engine.quotas.largest == (2, 2 * (RECORD_BYTES + 3))
    # A key counts for the one that created it: whoever writes it later needs no room.
    assert owned(store, "user:a", "SET b0 w") is None
    assert owned(store, "user:a", "DEL b1") is None
    assert owned(store, "user:a", "SET a2 v") is StoreError.QUOTA
    assert store.engine.refused_share == 2
    assert owned(store, "user:b", "SET b1 v") is None
    assert owned(store, "", "DEL a0") is None
    assert owned(store, "user:a", "SET a2 v") is None


def test_one_principal_has_a_share_of_the_bytes_also_after_a_restart() -> None:
    limit = 2 * (RECORD_BYTES + 10)
    store = Store(Engine(max_bytes=2 * limit, share=50))
    assert owned(store, "user:a", "SET aa 12345678") is None
    assert owned(store, "user:a", "SET ab 12345678") is None
    assert owned(store, "user:a", "SET ab 123456789") is StoreError.QUOTA
    assert owned(store, "user:b", "SET ab 123456789") is StoreError.QUOTA, "it grows what is a's"
    records = [decode_record(encode_record(record)) for record in store.engine._records.values()]
    again = Store(Engine(max_bytes=2 * limit, share=50))
    again.engine.restore([record for record in records if record is not None], None)
    assert again.engine.size == store.engine.size == limit
    assert owned(again, "user:a", "SET ac 1") is StoreError.QUOTA
    assert again.engine.refused_share == 1
    assert owned(again, "", "SET ac 12345678") is None


def test_keys_that_expire_leave_the_share_of_their_principal() -> None:
    store = Store(Engine(max_keys=2, share=50))
    assert owned(store, "user:a", "SET a v PX 10") is None
    assert owned(store, "user:a", "SET b v") is StoreError.QUOTA
    store.now += 11
    store.steady += 11
    assert owned(store, "user:a", "SET b v") is None
    assert store.engine.quotas.largest == (1, RECORD_BYTES + 2)


@pytest.mark.parametrize("granted", Access)
@pytest.mark.parametrize("verb", Verb)
def test_each_command_does_what_its_access_permits(verb: Verb, granted: Access) -> None:
    """The first example of each command changes keys only with Write, and does not change keys that it only reads."""
    engine = Engine(
        extensions=~Extension.NONE, secret=bytes(16), authorise=lambda _, access, __: rights[0] & access == access
    )
    rights = [Access.READ | Access.WRITE]
    spec = COMMANDS[verb]

    def execute(words: str) -> tuple[Answer, list[Change]]:
        command = parse([b"" if word == "''" else word.encode() for word in words.split(" ")], ~Extension.NONE)
        assert isinstance(command, Command)
        return engine.execute(command, Context("c", SDK, f"{NOW}:0:c".encode()), NOW, NOW)

    example = spec.examples[0]
    for words in example.before:
        assert execute(words)[0].error is None
    rights[0] = granted
    answer, changes = execute(example.request)
    if spec.authorizes_each_key:
        assert answer.error is None
        assert bool(changes) == (granted is spec.access is Access.WRITE)
    elif granted is not spec.access:
        assert (answer.error, changes) == (StoreError.NOT_AUTHORIZED, [])
    else:
        assert answer.error is None
        assert bool(changes) == (granted is Access.WRITE)


def test_the_table_of_the_keys_shrinks_with_them() -> None:
    store = Store()
    version = Hlc(NOW, 0, "n")
    keys = [(b"key%d" % number, NOW + (1000 if number >= 100 else 9000)) for number in range(50_000)]
    store.engine.restore([Record(key, b"v", version, None, expires_at) for key, expires_at in keys], None)
    table = store.engine._records
    full = sys.getsizeof(table)
    store.pass_ms(1001)
    assert store.engine.keys == 100
    assert sys.getsizeof(table) < full / 8
    assert store.ask("GET key7").value == b"v"
    assert len(store.pass_ms(8000)) == 100

"""What the published document does not have: SCAN, MGET, PTTL, ASOF, prefixes, resuming, prefix fences."""

from __future__ import annotations

import pytest

from penstock.statestore.answer import Answer, AnswerKind, Context
from penstock.statestore.commands import Access, Command, Extension, StoreError, parse
from penstock.statestore.dialects import SDK
from penstock.statestore.engine import Engine
from penstock.statestore.fences import Fences
from penstock.statestore.history import History
from penstock.statestore.hlc import Hlc
from penstock.statestore.keyspace import PAGE_KEYS
from penstock.statestore.observers import Observers
from penstock.statestore.record import Change

NOW = 1_700_000_000_000
ALL = ~Extension.NONE
START = Hlc(0, 0, "")


class Store:
    """An engine with everything switched on unless told."""

    def __init__(self, extensions: Extension = ALL, *, history: int = 1000, **options: object) -> None:
        self.engine = Engine(extensions=extensions, **options)  # type: ignore[arg-type]
        if history:
            self.engine.history = History(START, history, 1 << 20)
        self.now = NOW
        self.changes: list[Change] = []

    def send(self, args: list[bytes], *, ft: str | None = None, client: str = "c", prefix: str | None = None) -> Answer:
        command = parse(args, self.engine.extensions)
        if not isinstance(command, Command):
            return Answer(AnswerKind.ERROR, error=command)
        user = {} if prefix is None else {"__fencePrefix": prefix}
        context = Context(client, SDK, f"{self.now}:0:{client}", ft, user=user)
        answer, changes = self.engine.execute(command, context, self.now, self.now)
        self.changes += changes
        return answer

    def ask(self, words: str, *, ft: str | None = None, client: str = "c", prefix: str | None = None) -> Answer:
        return self.send([word.encode() for word in words.split(" ")], ft=ft, client=client, prefix=prefix)

    def version(self, words: str) -> Hlc:
        version = self.ask(words).version
        assert version is not None
        return version

    def told(self) -> list[tuple[bytes, list[str]]]:
        told = [(change.key, sorted(client for client, _ in change.observers)) for change in self.changes]
        self.changes.clear()
        return told


def scan(store: Store, pattern: str) -> list[list[bytes]]:
    """All pages of a scan."""
    pages, args = [], [b"SCAN", pattern.encode()]
    while True:
        answer = store.send(args)
        assert (answer.kind, answer.version) == (AnswerKind.PAYLOAD, None)
        head, _, rest = answer.value.partition(b"\r\n")
        count, _, rest = rest.partition(b"\r\n")
        items = rest.split(b"\r\n")[1::2]
        pages.append(items[: int(count[1:])])
        if head == b"*1":
            return pages
        args = [b"SCAN", pattern.encode(), items[-1]]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("MGET k", StoreError.UNKNOWN_COMMAND),
        ("PTTL k", StoreError.UNKNOWN_COMMAND),
        ("GET k ASOF 1:0:n", StoreError.ARITY),
        ("KEYNOTIFY k PREFIX", StoreError.SYNTAX),
        ("KEYNOTIFY k AFTER 1:0:n", StoreError.SYNTAX),
        ("SCAN k", None),
    ],
)
def test_what_is_off_is_refused_as_unknown(words: str, error: StoreError | None) -> None:
    assert Store(Extension.SCAN, history=0).ask(words).error is error


def test_scan_can_be_switched_off_and_a_fence_prefix_is_never_ignored() -> None:
    store = Store(Extension.NONE)
    assert store.ask("SCAN *").error is StoreError.UNKNOWN_COMMAND
    assert store.ask("SET k v", ft=f"{NOW}:0:n", prefix="p/").error is StoreError.SYNTAX
    assert store.changes == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("SCAN", StoreError.ARITY),
        ("SCAN a b c", StoreError.ARITY),
        ("SCAN ", StoreError.KEY_EMPTY),
        ("SCAN " + "a" * 4097, StoreError.SYNTAX),
        ("SCAN a* 1;3;k", StoreError.BAD_TOKEN),
        ("SCAN a* 2;2;k", StoreError.BAD_TOKEN),
        ("SCAN a* x", StoreError.BAD_TOKEN),
        ("MGET", StoreError.ARITY),
        ("MGET a  b", StoreError.KEY_EMPTY),
        ("PTTL", StoreError.ARITY),
        ("PTTL a b", StoreError.ARITY),
        ("GET k ASOF", StoreError.ARITY),
        ("GET k ASOF 1:0", StoreError.SYNTAX),
        ("GET k ASOF 1:0:n x", StoreError.ARITY),
        ("GET k SINCE 1:0:n", StoreError.SYNTAX),
        ("KEYNOTIFY k AFTER", StoreError.SYNTAX),
        ("KEYNOTIFY k AFTER x", StoreError.SYNTAX),
        ("KEYNOTIFY k AFTER 1:0:n STOP", StoreError.ARITY),
        ("KEYNOTIFY k PREFIX PREFIX", StoreError.SYNTAX),
        ("KEYNOTIFY k prefix stop x", StoreError.ARITY),
    ],
)
def test_malformed(words: str, error: StoreError) -> None:
    assert Store().ask(words).error is error


def test_scan_pages_hold_every_stable_key_once_whatever_is_written_meanwhile() -> None:
    store = Store(history=0)
    stable = {b"s%05d" % number for number in range(2 * PAGE_KEYS + 500)}
    for key in stable:
        store.send([b"SET", key, b"v"])
    store.ask("SET t v")
    first = store.ask("SCAN s*")
    assert first.value.startswith(b"*2\r\n*1000\r\n")
    for number in range(400):
        store.send([b"SET", b"s%05d-new" % (3 * number), b"v"])
        store.send([b"DEL", b"s%05d-new" % number])
    found = [key for page in scan(store, "s*") for key in page if not key.endswith(b"-new")]
    assert len(found) == len(stable)
    assert set(found) == stable
    assert found == sorted(found)


def test_scan_looks_at_a_bounded_number_of_keys_a_page_and_skips_what_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.statestore.keyspace.PAGE_LOOKED_AT", 10)
    store = Store(history=0)
    for number in range(35):
        store.send([b"SET", b"k%02d" % number, b"v", b"PX", b"%d" % (10 if number == 34 else 1000)])
    store.ask("DEL k33")
    store.now += 10
    assert scan(store, "*3") == [[b"k03"], [b"k13"], [b"k23"], []]
    assert scan(store, "k3?") == [[b"k30", b"k31", b"k32"]]
    assert scan(store, "k05") == [[b"k05"]]
    assert scan(store, "z*") == [[]]


def test_scan_shows_the_keys_that_the_client_may_read() -> None:
    def authorise(_: Context, access: Access, key: bytes) -> bool:
        return access is Access.WRITE or key.startswith(b"open/")

    store = Store(authorise=authorise)
    for key in ("open/a", "open/b", "secret/a"):
        store.ask(f"SET {key} v")
    assert scan(store, "*") == [[b"open/a", b"open/b"]]
    assert store.ask("MGET open/a secret/a").error is StoreError.NOT_AUTHORIZED


def test_the_index_forgets_removed_keys_and_gives_up_when_nobody_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.statestore.keyspace._UNMERGED", 4)
    monkeypatch.setattr("penstock.statestore.keyspace._IDLE_KEYS", 20)
    store = Store(history=0)
    for number in range(10):
        store.ask(f"SET {number} v")
    assert len(scan(store, "*")[0]) == 10
    for number in range(9):
        store.ask(f"DEL {number}")
    assert scan(store, "*") == [[b"9"]]
    for number in range(30):
        store.ask(f"SET n{number} v")
    assert store.engine._index is None
    assert len(scan(store, "*")[0]) == 31


def test_mget_is_one_version() -> None:
    store = Store()
    a, b = store.version("SET a 1"), store.version("SET b 22")
    answer = store.ask("MGET b nothing a")
    assert answer.version is not None
    assert answer.version >= b
    assert answer.value == (
        b"*6\r\n$2\r\n22\r\n$%d\r\n%b\r\n$-1\r\n$-1\r\n$1\r\n1\r\n$%d\r\n%b\r\n"
        % (len(str(b)), str(b).encode(), len(str(a)), str(a).encode())
    )


def test_pttl() -> None:
    store = Store()
    version = store.version("SET k v PX 500")
    store.now += 200
    answer = store.ask("PTTL k")
    assert (answer.value, answer.version) == (b":300\r\n", version)
    store.ask("SET k v")
    assert store.ask("PTTL k").value == b":-1\r\n"
    assert (store.ask("PTTL none").value, store.ask("PTTL none").version) == (b":-2\r\n", None)


def test_get_as_of_an_older_version() -> None:
    store = Store()
    before = store.version("SET other v")
    one = store.version("SET k 1")
    two = store.version("SET k 2")
    gone = store.version("DEL k")
    three = store.version("SET k 3")

    def at(version: Hlc) -> bytes | None:
        answer = store.ask(f"GET k ASOF {version}")
        assert answer.error is None
        return None if answer.kind is AnswerKind.MISSING else answer.value

    assert [at(v) for v in (before, one, two, gone, three)] == [None, b"1", b"2", None, b"3"]
    assert store.ask(f"GET k ASOF {two}").version == two
    assert at(Hlc(NOW * 2, 0, "n")) == b"3"


def test_a_bounded_history_says_when_it_does_not_reach() -> None:
    store = Store(history=3)
    versions = [store.version(f"SET k {number}") for number in range(6)]
    assert store.ask(f"GET k ASOF {versions[2]}").value == b"2"
    assert store.ask(f"GET k ASOF {versions[1]}").error is StoreError.HISTORY
    assert store.ask(f"KEYNOTIFY k AFTER {versions[1]}").error is StoreError.HISTORY
    assert not store.engine.observes("c", b"k")
    # What has not changed since is known however old.
    old = store.version("SET still v")
    for number in range(5):
        store.ask(f"SET k {number}")
    assert store.ask(f"GET still ASOF {old}").value == b"v"


def test_an_observation_that_resumes_gets_what_it_missed_in_order() -> None:
    store = Store()
    store.ask("SET k 1")
    seen = store.version("SET k 2")
    store.ask("SET other v")
    store.ask("SET k 3")
    store.ask("DEL k")
    answer = store.ask(f"KEYNOTIFY k AFTER {seen}")
    assert answer.version == store.engine.clock
    assert [c.record.value if c.record is not None else None for c in answer.missed] == [b"3", None]
    assert store.engine.observes("c", b"k")
    assert store.ask("KEYNOTIFY k").missed == ()


def test_a_prefix_is_observed_and_each_client_told_once() -> None:
    store = Store()
    assert store.ask("KEYNOTIFY line/ PREFIX", client="p").kind is AnswerKind.OK
    store.ask("KEYNOTIFY line/3/ PREFIX", client="p")
    store.ask("KEYNOTIFY line/3/a", client="k")
    store.ask("KEYNOTIFY line/3/a", client="p")
    for key in ("line/3/a", "line/3/b", "line", "other"):
        store.ask(f"SET {key} v")
    assert store.told() == [(b"line/3/a", ["k", "p"]), (b"line/3/b", ["p"]), (b"line", []), (b"other", [])]
    assert store.ask("KEYNOTIFY line/ STOP", client="p").count == 0
    assert store.ask("KEYNOTIFY line/ PREFIX STOP", client="p").kind is AnswerKind.OK
    store.ask("SET line/4 v")
    store.engine.forget("p")
    store.ask("SET line/3/a v")
    assert store.told() == [(b"line/4", []), (b"line/3/a", ["k"])]
    assert store.engine.observations == 1


def test_a_prefix_resumes_too() -> None:
    store = Store()
    seen = store.version("SET line/1 a")
    for key in ("line/1", "line/2", "other"):
        store.ask(f"SET {key} b")
    answer = store.ask(f"KEYNOTIFY line/ PREFIX AFTER {seen}")
    assert [change.key for change in answer.missed] == [b"line/1", b"line/2"]


def test_a_prefix_observer_is_told_of_the_keys_that_it_may_read() -> None:
    def authorise(_: Context, access: Access, key: bytes) -> bool:
        return access is Access.WRITE or b"secret" not in key

    store = Store(authorise=authorise)
    seen = store.version("SET line/0 v")
    store.ask("KEYNOTIFY line/ PREFIX", client="p")
    store.ask("SET line/1 v")
    store.ask("SET line/secret v")
    assert [clients for _, clients in store.told()] == [[], ["p"], []]
    assert not store.engine.observes("p", b"line/secret")
    missed = store.ask(f"KEYNOTIFY line/ PREFIX AFTER {seen}").missed
    assert [change.key for change in missed] == [b"line/1"]


def test_a_prefix_fence_stops_a_zombie_that_writes_a_new_key() -> None:
    store = Store()
    zombie = store.version("SET lock a NEX PX 10")
    store.now += 10
    store.engine.tick(store.now, store.now)
    token = store.version("SET lock b NEX PX 10")
    store.ask("SET line/old v")
    assert store.ask("SET run b", ft=str(token), prefix="line/").kind is AnswerKind.OK
    for words in ("SET line/new v", "SET line/old v", "DEL line/old", "DEL line/nothing", "VDEL line/old v"):
        assert store.ask(words).error is StoreError.FENCE_REQUIRED, words
        assert store.ask(words, ft=str(zombie)).error is StoreError.FENCE_LOWER, words
    assert store.ask("SET line/new v", ft=str(token)).kind is AnswerKind.OK
    assert store.ask("DEL line/new", ft=str(token)).count == 1
    # A delete removes the fence of the key and not the floor of the prefix.
    assert store.ask("SET line/new v", ft=str(zombie)).error is StoreError.FENCE_LOWER
    assert store.ask("SET line v").kind is AnswerKind.OK
    assert store.ask("GET line/old").kind is AnswerKind.VALUE


def test_a_floor_rises_and_never_falls_and_needs_a_token() -> None:
    store = Store()
    low, high = f"{NOW}:1:n", f"{NOW}:2:n"
    store.ask("SET run v", ft=high, prefix="p/")
    assert store.ask("SET run2 v", ft=low, prefix="p/").error is StoreError.FENCE_LOWER
    assert store.ask("SET run3 v", ft=high, prefix="p/").kind is AnswerKind.OK
    assert [change.floor for change in store.changes] == [(b"p/", Hlc(NOW, 2, "n")), None]
    assert store.ask("SET run v", prefix="p/").error is StoreError.FENCE_PREFIX
    assert store.ask("SET run v", ft=high, prefix="").error is StoreError.FENCE_PREFIX
    assert store.ask("SET run v NX", ft=high, prefix="q/").kind is AnswerKind.NOT_MET
    assert store.ask("SET q/new v").kind is AnswerKind.OK


def test_a_client_may_fence_what_it_may_write() -> None:
    store = Store(authorise=lambda _context, _access, key: not key.startswith(b"theirs"))
    assert store.ask("SET k v", ft=f"{NOW}:0:n", prefix="theirs/").error is StoreError.NOT_AUTHORIZED
    assert store.ask("SET k v", ft=f"{NOW}:0:n", prefix="mine/").kind is AnswerKind.OK


def test_floors_of_nested_prefixes() -> None:
    fences = Fences()
    fences.restore([(b"a/", Hlc(1, 0, "n")), (b"a/b/", Hlc(3, 0, "n"))])
    assert fences.lift(b"a/b/c/", Hlc(2, 0, "n"))
    assert fences.floor_of(b"a/b/c/d") == Hlc(3, 0, "n")
    assert fences.floor_of(b"a/x") == Hlc(1, 0, "n")
    assert fences.floor_of(b"a") is None
    assert not fences.lift(b"a/", Hlc(1, 0, "n"))


def test_floors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.statestore.fences.MAX_PREFIXES", 1)
    store = Store()
    token = f"{NOW}:0:n"
    store.ask("SET run v", ft=token, prefix="a/")
    assert store.ask("SET other v", ft=token, prefix="b/").error is StoreError.QUOTA
    assert store.ask("SET run v", ft=token, prefix="a/").kind is AnswerKind.OK


def test_observations_of_keys_and_prefixes_are_counted_together() -> None:
    observers = Observers()
    assert observers.add("c", b"k", SDK, prefix=False)
    assert observers.add("c", b"k", SDK, prefix=True)
    assert len(observers) == 2
    assert observers.remove("c", b"k", prefix=True)
    assert not observers.remove("c", b"k", prefix=True)
    assert observers.observes("c", b"k")
    assert not observers.observes("c", b"kk")


def test_quota_in_bytes_counts_keys_values_and_records() -> None:
    store = Store(history=0, max_bytes=1000)
    assert store.ask("SET a " + "x" * 400).kind is AnswerKind.OK
    assert store.ask("SET b " + "x" * 400).error is StoreError.QUOTA
    # Overwriting with no more is allowed also at the quota, more is not.
    assert store.ask("SET a " + "y" * 400).kind is AnswerKind.OK
    assert store.ask("SET a " + "y" * 2000).error is StoreError.QUOTA
    assert store.ask("GET a").value == b"y" * 400
    store.ask("SET a y PX 10")
    store.ask("SET b y")
    before = store.engine.size
    store.now += 10
    assert store.ask("SET c " + "x" * 300).kind is AnswerKind.OK
    store.ask("DEL c")
    assert store.engine.size == before - 262
    store.ask("DEL b")
    assert store.engine.size == 0

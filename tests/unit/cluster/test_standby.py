"""The log of a standby without etcd: which commits it accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from penstock.cluster import follow, standby
from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import CommitFrame, Head, encode_frame
from penstock.cluster.follow import LogFollower
from penstock.cluster.log import PAGE, LogKeys
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.standby import Standby, StandbyLog, applied_by_members
from penstock.errors import RefusedError, StorageError, UnavailableError
from penstock.runtime.io.commit_log import LogPosition
from tests.ports import free_port

POSITION = LogPosition(b"identity", 0, 7)


@pytest.fixture
def log() -> StandbyLog:
    return StandbyLog(EtcdClient([f"127.0.0.1:{free_port()}"]), "/test/", "rows")


def test_commits_of_the_active_node_are_accepted_in_order(log: StandbyLog) -> None:
    assert log.recover(POSITION) == ([], POSITION)
    assert log.append(8, b"")
    assert log.append(9, b"")
    with pytest.raises(AssertionError, match="no gaps"):
        log.append(11, b"")
    assert log.position.sequence == 9
    assert log.released == 7
    log.release(9)
    assert log.released == 9
    assert log.may_wait()
    assert not log.is_scarce()
    log.close()


def test_commits_wait_for_lmdb_when_it_is_far_behind(log: StandbyLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "PENDING_BYTES", 100)
    log.recover(POSITION)
    assert log.append(8, bytes(60))
    assert log.append(9, bytes(60))
    assert not log.append(10, bytes(60)), "LMDB takes it at once, with those before it"
    assert log.position.sequence == 9
    log.release(10)
    assert (log.position.sequence, log.released) == (10, 10)
    assert log.append(11, bytes(60))
    log.close()


def test_reports_of_standbys_are_read_and_others_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        "a": b'{"rows": 7, "keys": 1}',
        "b": b'{"rows": 9}',
        "me": b'{"rows": 1}',
        "x": b"not JSON",
        "y": b"[]",
        "z": b'{"rows": null}',
    }
    entries = [pb.KeyValue(key=f"/test/member/{name}".encode(), value=value) for name, value in reports.items()]
    monkeypatch.setattr(EtcdClient, "call", lambda *_args, **_options: pb.RangeResponse(kvs=entries))
    client = EtcdClient(["127.0.0.1:1"])
    assert applied_by_members(client, "/test/", "me") == {"rows": [7, 9], "keys": [1]}


def test_an_empty_standby_needs_a_log_that_answers(log: StandbyLog, monkeypatch: pytest.MonkeyPatch) -> None:
    call = EtcdClient.call
    monkeypatch.setattr(EtcdClient, "call", lambda self, *args: call(self, *args, within_s=0.1))
    with pytest.raises(StorageError, match="cannot be read"):
        log.recover(None)


class ScriptedFollower:
    """Ends the standby after its last step; before, each call of ``next`` takes one."""

    def __init__(self, found: list[Standby], steps: list[Exception | None]) -> None:
        self.found = found
        self.steps = steps

    def next(self, _applied: Mapping[str, LogPosition], _wait_s: float) -> dict[str, list[CommitFrame]]:
        step = self.steps.pop(0)
        if not self.steps:
            self.found[0]._closed.set()
        if step is not None:
            raise step
        return {}

    def close(self) -> None:
        """Nothing to end."""


def test_a_standby_logs_why_it_does_not_follow_once_until_it_follows_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    away, denied = UnavailableError("no answer", applied=None), RefusedError("no right", text="permission denied")
    found: list[Standby] = []
    other = UnavailableError("another one", applied=None)
    steps: list[Exception | None] = [away, other, denied, denied, None, away, None]
    monkeypatch.setattr(standby, "LogFollower", lambda *_: ScriptedFollower(found, steps))
    monkeypatch.setattr(Standby, "_report", lambda _: None)
    found.append(Standby(EtcdClient(["127.0.0.1:1"]), "/test/", "node", {}, {}))
    found[0].start()
    found[0]._thread.join(60)
    found[0].close()
    behind, again = "this node does not follow the active one for now: ", "this node follows the active one again"
    assert [line.message for line in caplog.records] == [
        f"{behind}no answer",
        f"{behind}no right",
        again,
        f"{behind}no answer",
        again,
    ]


def test_a_standby_follows_a_full_etcd_which_refuses_its_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = RefusedError("KV/Txn was rejected", text="etcdserver: mvcc: database space exceeded")
    found: list[Standby] = []
    steps: list[Exception | None] = [None] * 5
    monkeypatch.setattr(standby, "LogFollower", lambda *_: ScriptedFollower(found, steps))
    monkeypatch.setattr("time.monotonic", iter(range(100, 1000, 2)).__next__)
    reports: list[int] = []

    def report(_: Standby) -> None:
        reports.append(1)
        if len(reports) < 4:
            raise full

    monkeypatch.setattr(Standby, "_report", report)
    found.append(Standby(EtcdClient(["127.0.0.1:1"]), "/test/", "node", {}, {}))
    caplog.set_level(logging.INFO)
    found[0]._follower = ScriptedFollower(found, steps)  # type: ignore[assignment]
    found[0]._follow()
    assert steps == []
    assert [line.message for line in caplog.records] == [
        "this node cannot report what it has, and follows the active one: KV/Txn was rejected",
        "this node follows the active one again",
    ]


class IdleWatch:
    """Reports no change."""

    def __init__(self, _client: EtcdClient, _keys: list[bytes], _on_change: Callable[[], None]) -> None:
        """Nothing to watch."""

    def follow_endpoint(self) -> None:
        """Watch nothing elsewhere."""


class Etcd:
    """Logs whose last commits are ``heads``, instead of a client. Frames of the log "rows" have ``parts_of_rows``,
    which cannot be read; without ``frames`` etcd has none."""

    def __init__(self, heads: dict[str, int], *, parts_of_rows: int = 0, frames: bool = True) -> None:
        self.heads = heads
        self.parts_of_rows = parts_of_rows
        self.most_commits = 2 * PAGE
        """Commits that etcd can send within the deadline."""
        self.calls: list[str] = []
        self._frames = frames

    def call(self, method: str, request: pb.TxnRequest, _response: object, **_: object) -> pb.TxnResponse:
        self.calls.append(method)
        if method == "KV/Range":
            raise UnavailableError("no answer", applied=None)
        answer = pb.TxnResponse(succeeded=True)
        for (name, last), commits in zip(self.heads.items(), request.success[1::2], strict=True):
            value = Head(b"identity", last, 1).encode()
            answer.responses.add().response_range.kvs.add(key=LogKeys("/test/", name).head, value=value)
            found = answer.responses.add().response_range
            first = int(commits.request_range.key.rpartition(b"/")[2], 16)
            parts = self.parts_of_rows if name == "rows" else 0
            for sequence in range(first, last + 1)[: commits.request_range.limit] if self._frames else ():
                found.kvs.add(value=encode_frame(Head(b"", sequence, 1), 0, b"%d" % sequence, parts))
        if sum(len(each.response_range.kvs) for each in answer.responses[1::2]) > self.most_commits:
            raise UnavailableError("deadline exceeded", applied=None)
        return answer


def follower_of(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> LogFollower:
    monkeypatch.setattr(follow, "KeyWatch", IdleWatch)
    return LogFollower(cast(EtcdClient, etcd), "/test/", [*etcd.heads])


def frame(sequence: int) -> CommitFrame:
    return CommitFrame(1, sequence, 0, 0, 0, 0, b"%d" % sequence)


def test_commits_that_were_read_before_an_error_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other log's error interrupts is not lost: the standby says each time what it has applied."""
    etcd = Etcd({"keys": 9, "rows": 8}, parts_of_rows=1)
    follower = follower_of(etcd, monkeypatch)
    applied = {"keys": POSITION, "rows": POSITION}
    with pytest.raises(UnavailableError):
        follower.next(applied)
    etcd.parts_of_rows = 0
    found = follower.next(applied, 60)  # does not wait
    assert {name: [each.body for each in frames] for name, frames in found.items()} == {
        "keys": [b"8", b"9"], "rows": [b"8"],
    }  # fmt: skip


def test_commits_are_read_in_one_request_for_all_logs_and_one_for_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd({"keys": 7 + PAGE + 1, "rows": 8})
    follower = follower_of(etcd, monkeypatch)
    applied = {"keys": POSITION, "rows": POSITION}
    found = follower.next(applied, 60)
    assert {name: len(frames) for name, frames in found.items()} == {"keys": PAGE, "rows": 1}
    assert etcd.calls == ["KV/Txn"]
    applied = {"keys": POSITION._replace(sequence=7 + PAGE), "rows": POSITION._replace(sequence=8)}
    assert [*follower.next(applied, 60)] == ["keys"], "it does not wait for a change"
    assert etcd.calls == ["KV/Txn"] * 2


def test_fewer_commits_are_read_while_a_read_of_large_ones_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd({"keys": 7 + 2 * PAGE, "rows": 7 + 2 * PAGE})
    etcd.most_commits = PAGE // 2
    follower = follower_of(etcd, monkeypatch)
    applied = {"keys": POSITION, "rows": POSITION}
    answers: list[bool] = []
    while any(position.sequence < 7 + 2 * PAGE for position in applied.values()):
        try:
            found = follower.next(applied, 0)
        except UnavailableError:
            answers.append(False)
            continue
        answers.append(True)
        applied = {name: POSITION._replace(sequence=frames[-1].sequence) for name, frames in found.items()}
    assert answers[:4] == [False, False, True, False], "half of the commits, a quarter, then one more"
    assert answers.count(False) <= len(answers) // 2 + 1
    etcd.most_commits = 2 * PAGE
    for _ in range(PAGE):
        assert follower.next(applied, 0) == {}
    etcd.heads["keys"] += PAGE
    assert len(follower.next(applied, 0)["keys"]) == PAGE, "after enough answers it reads as many as usual"


def test_a_read_after_a_change_has_the_commits_of_the_time_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd({"keys": 7, "rows": 7})
    follower = follower_of(etcd, monkeypatch)
    applied = {"keys": POSITION, "rows": POSITION}
    assert follower.next(applied) == {}
    assert follower.next(applied, 0) == {}, "etcd is read without a change, too"

    def wait(_seconds: float) -> bool:
        etcd.heads["keys"] = 10  # commits that follow each other
        return False

    monkeypatch.setattr(follower._closing, "wait", wait)
    follower._changed.set()
    assert [each.sequence for each in follower.next(applied, 60)["keys"]] == [8, 9, 10]
    assert len(etcd.calls) == 3


def test_a_standby_stops_before_a_commit_whose_predecessor_it_lacks(log: StandbyLog) -> None:
    applied: list[bytes] = []

    class Environment:
        def commit_body(self, body: bytes, _what: str) -> None:
            log.append(log.position.sequence + 1, body)
            applied.append(body)

    log.recover(POSITION)
    node = Standby(EtcdClient(["127.0.0.1:1"]), "/test/", "node", {"rows": cast(Any, Environment())}, {"rows": log})
    node._apply("rows", [frame(8)])
    with pytest.raises(StorageError, match="commit 10 was received after commit 8"):
        node._apply("rows", [frame(10)])
    assert applied == [b"8"]


def test_a_node_whose_log_is_not_that_of_the_active_node_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    follower = follower_of(Etcd({"rows": 2}), monkeypatch)
    with pytest.raises(StorageError) as caught:
        follower.next({"rows": LogPosition(b"lost log", 0, 7)})
    assert caught.value.what == "rows: this node has commit 7, and etcd has another log, which ends with commit 2"
    assert (caught.value.hint or "").startswith(
        "if another node continues the log in etcd, start this one with an empty data directory"
    )


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([9, 6], "rows: etcd had commit 9, and etcd has a log that ends with commit 6"),
        ([6], "rows: this node has commit 7, and etcd has a log that ends with commit 6"),
        ([9, 9], "etcd: commit 8 is not in the log"),
    ],
)
def test_a_log_that_has_lost_commits_was_restored_and_one_with_the_same_end_has_deleted_them(
    monkeypatch: pytest.MonkeyPatch, heads: list[int], message: str
) -> None:
    """etcd may be restored between two reads."""
    etcd = Etcd({"rows": heads[0]}, frames=False)
    follower = follower_of(etcd, monkeypatch)
    monkeypatch.setattr(follow, "read_head", lambda *_: Head(b"identity", heads[1], 1))
    with pytest.raises(StorageError) as caught:
        follower.next({"rows": POSITION})
    assert caught.value.what == message
    assert ("cluster.new_log" in str(caught.value)) == (len(set(heads)) > 1 or heads == [6])

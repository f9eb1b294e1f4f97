"""The log of a standby without etcd: which commits it accepts."""

from __future__ import annotations

import pytest

from penstock.cluster import standby
from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.standby import StandbyLog, applied_by_members
from penstock.errors import StorageError
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

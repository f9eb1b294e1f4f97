"""Commits of a log with prepared answers of etcd."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cluster.client import DEADLINE_S, EtcdClient, EtcdDeniedError, EtcdUnavailableError
from penstock.cluster.commit import Head
from penstock.cluster.log import EtcdLog, EtcdLogs
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError, RefusedError, StorageError

IDENTITY = b"identity"
TERM = 5
ACCEPTED = pb.TxnResponse(header=pb.ResponseHeader(revision=7), succeeded=True)
REFUSED = pb.TxnResponse(succeeded=False)


class PreparedEtcd(EtcdClient):
    """A client that returns ``answers``, one after the other, or raises them. None: no answer."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(["127.0.0.1:1"])
        self.answers = [*answers]
        self.requests: list[Any] = []

    def once(self, method: str, request: Any, response: Any, *, deadline_s: float = DEADLINE_S) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if answer is None:
            raise EtcdUnavailableError(f"etcd: no answer to {method} within {deadline_s} s")
        if isinstance(answer, PenstockError):
            raise answer
        assert isinstance(answer, response)
        return answer


def started(etcd: PreparedEtcd) -> EtcdLog:
    """A log without commits, of which etcd has the head."""
    head = pb.KeyValue(value=Head(IDENTITY, 0, 3).encode(), mod_revision=4)
    begun = pb.TxnResponse(header=pb.ResponseHeader(revision=6), succeeded=True)
    etcd.answers[:0] = [pb.RangeResponse(kvs=[head]), pb.RangeResponse(), begun]
    log = EtcdLogs(etcd, "/penstock/test/", TERM, ["store"]).logs["store"]
    log.recover(None)
    log.start()
    etcd.requests.clear()
    return log


def state(head: Head) -> pb.TxnResponse:
    """The answer to the read of head and leadership key."""
    found = pb.KeyValue(value=head.encode(), mod_revision=8), pb.KeyValue(mod_revision=TERM)
    answers = [pb.ResponseOp(response_range=pb.RangeResponse(kvs=[each])) for each in found]
    return pb.TxnResponse(succeeded=True, responses=answers)


def test_a_commit_is_one_transaction_without_reads() -> None:
    etcd = PreparedEtcd(ACCEPTED, ACCEPTED)
    log = started(etcd)
    assert log.append(1, b"one")
    assert log.append(2, b"two")
    assert [[compare.mod_revision for compare in request.compare] for request in etcd.requests] == [[5, 6], [5, 7]]
    assert [len(request.success) for request in etcd.requests] == [2, 2]
    assert not any(request.failure for request in etcd.requests)


def test_a_commit_in_doubt_is_accepted_if_the_head_that_is_read_later_is_its_own() -> None:
    own = Head(IDENTITY, 1, TERM)
    etcd = PreparedEtcd(None, REFUSED, None, state(own), ACCEPTED)
    log = started(etcd)
    assert log.append(1, b"one")
    assert log.append(2, b"two")
    assert etcd.requests[-1].compare[1].mod_revision == 8


def test_a_read_without_an_answer_puts_no_commit_in_doubt() -> None:
    etcd = PreparedEtcd(REFUSED, None, state(Head(IDENTITY, 1, TERM)))
    log = started(etcd)
    with pytest.raises(StorageError, match="does not continue the log in etcd"):
        log.append(1, b"one")


def test_a_commit_waits_until_etcd_admits_the_user_again() -> None:
    """As after the user lost its role by mistake, or while its password is replaced."""
    denied = EtcdDeniedError("etcd: KV/Txn was rejected: etcdserver: permission denied", code=7)
    etcd = PreparedEtcd(denied, denied, ACCEPTED, RefusedError("etcd: request is too large", code=3))
    log = started(etcd)
    assert log.append(1, b"one")
    assert etcd.requests[0] == etcd.requests[2]
    with pytest.raises(StorageError, match="etcd rejected a commit"):
        log.append(2, b"two")

"""Commits to etcd without a node: one transaction at a time, with the comparisons and the client of a node."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb

__all__ = ["BareCommits", "CommitTotals", "read_totals"]

_HEAD: Final = struct.Struct(">QQQ12x")
"""Commits, ns in which they ran, and bytes; as long as the head of a node's log."""


class CommitTotals(NamedTuple):
    """Commits so far, the seconds in which they ran, and their bytes."""

    commits: int
    seconds: float
    size: int


class BareCommits:
    """Puts values at the member that leads, as a node does. ``prefix``: of the keys; others must not write there."""

    def __init__(self, endpoints: Sequence[str], prefix: str) -> None:
        self._client = EtcdClient(endpoints)
        self._client.prefer_leader()
        self._leader, self._head, self._frame = (f"{prefix}/{name}".encode() for name in ("leader", "head", "frame/"))
        self._commits = self._ns = self._size = 0
        first = pb.TxnRequest(success=[_put(self._leader, b"bare"), _put(self._head, self._totals())])
        self._term = self._revision = self._client.call("KV/Txn", first, pb.TxnResponse).header.revision

    def commit(self, size: int) -> None:
        """Put ``size`` bytes and the totals, if leadership key and head are unchanged."""
        began = time.perf_counter_ns()
        self._commits += 1
        self._size += size
        request = pb.TxnRequest(
            compare=[_unchanged(self._leader, self._term), _unchanged(self._head, self._revision)],
            success=[
                _put(self._frame + self._commits.to_bytes(8, "big"), bytes(size)),
                _put(self._head, self._totals()),
            ],
        )
        answer = self._client.call("KV/Txn", request, pb.TxnResponse)
        assert answer.succeeded
        self._revision = answer.header.revision
        self._ns += time.perf_counter_ns() - began

    def _totals(self) -> bytes:
        return _HEAD.pack(self._commits, self._ns, self._size)

    def close(self) -> None:
        """Delete the values."""
        frames = pb.DeleteRangeRequest(key=self._frame, range_end=self._frame + b"\xff" * 9)
        deletion = pb.RequestOp(request_delete_range=frames)
        self._client.call("KV/Txn", pb.TxnRequest(success=[deletion]), pb.TxnResponse)
        self._client.close()


def read_totals(client: EtcdClient, prefix: str) -> CommitTotals:
    """Read the totals of :class:`BareCommits` of another process before its last commit."""
    answer = client.call("KV/Range", pb.RangeRequest(key=f"{prefix}/head".encode()), pb.RangeResponse)
    commits, ns, size = _HEAD.unpack(answer.kvs[0].value)
    return CommitTotals(commits, ns / 1e9, size)


def _put(key: bytes, value: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))


def _unchanged(key: bytes, revision: int) -> pb.Compare:
    return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision)

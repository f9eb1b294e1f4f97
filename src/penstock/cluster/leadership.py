"""Leadership of a cluster: a key in etcd with a lease, which the active node keeps alive.

A new leader of etcd renews every lease for its full time: if node and etcd's leader fail together, a takeover takes the
time of an election and of the lease. Clocks are ``CLOCK_BOOTTIME``, which runs while the machine is suspended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from penstock.cluster.client import EtcdClient
from penstock.cluster.lease import LeaseClock
from penstock.cluster.log import LogKeys, leader_key, read_head, read_oldest
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import RefusedError, UnavailableError
from penstock.runtime.io.clock import boot_ms
from penstock.runtime.io.commit_log import LogPosition

__all__ = ["LEASE_S", "Leadership", "is_too_far_behind", "may_replace", "why_not_eligible"]

LEASE_S = 3
"""Lease of the leadership key in seconds. With it, a takeover took 5 to 6 s when node and etcd's leader failed
together; with 5 s it took 8 to 9 s."""

_log = logging.getLogger("penstock.cluster")


def why_not_eligible(client: EtcdClient, prefix: str, applied: Mapping[str, LogPosition | None]) -> str | None:
    """Return the reason why a node may not become active; None if it may.

    ``applied``: by log, the last commit in LMDB (None: an empty LMDB). A node that lacks commits which etcd has deleted
    would serve old data. Check this before a campaign and after winning one.

    Raises:
        UnavailableError, RefusedError: etcd does not answer.
    """
    for name, position in applied.items():
        keys = LogKeys(prefix, name)
        head = read_head(client, keys)
        sequence = 0 if position is None else position.sequence
        if head is None:
            if position is not None and not position.epoch:
                return f"{name}: etcd has no log, and this node has data"
            continue
        if position is not None and (position.identity != head.identity or position.epoch):
            return f"{name}: etcd has another log"
        if sequence > head.sequence:
            return f"{name}: this node has commit {sequence}, and the log in etcd ends with {head.sequence}"
        if sequence < head.sequence:
            oldest = read_oldest(client, keys)
            if oldest is None or oldest.sequence > sequence + 1:
                first = "is empty" if oldest is None else f"begins with {oldest.sequence}"
                return f"{name}: this node has commit {sequence}, and the log in etcd {first}"
    return None


def is_too_far_behind(client: EtcdClient, prefix: str, applied: Mapping[str, LogPosition | None]) -> bool:
    """Return True if the only reason of :func:`why_not_eligible` is that etcd has deleted commits which ``applied``
    lacks: a snapshot of the active node then replaces no commit that etcd does not have.

    Raises:
        UnavailableError, RefusedError: etcd does not answer.
    """
    lacks = False
    for name, position in applied.items():
        keys = LogKeys(prefix, name)
        head = read_head(client, keys)
        if head is None or not may_replace(position, LogPosition(head.identity, 0, head.sequence)):
            return False
        oldest = read_oldest(client, keys)
        sequence = 0 if position is None else position.sequence
        lacks |= sequence < head.sequence and (oldest is None or oldest.sequence > sequence + 1)
    return lacks


def may_replace(old: LogPosition | None, new: LogPosition) -> bool:
    """Return True if an environment at ``new`` has every commit of one at ``old`` (None: an empty one)."""
    return old is None or (old.identity == new.identity and old.epoch == new.epoch and old.sequence <= new.sequence)


class Leadership:
    """The leadership of the cluster with ``prefix``, for the node with the name ``node``.

    ``on_lost`` is called in a thread, once, when etcd reports that the lease of an active node has ended.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        node: str,
        *,
        lease_s: int = LEASE_S,
        clock: Callable[[], int] = boot_ms,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.term = 0
        """Revision of the leadership key while this node is active; 0 if it never was."""
        self._client = client
        self._key = leader_key(prefix)
        self._node = node
        self._lease_s = lease_s
        self._clock = clock
        self._on_lost = on_lost
        self._lease: LeaseClock | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def campaign(self) -> bool:
        """Try to become active; returns False if another node is active. Must not be called again after it returned
        True.

        Raises:
            UnavailableError, RefusedError: etcd does not answer, or its database is full.
        """
        sent_ms = self._clock()
        grant = self._client.call("Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=self._lease_s), pb.LeaseGrantResponse)
        lease = LeaseClock(grant.ID, grant.TTL, sent_ms)
        put = pb.PutRequest(key=self._key, value=self._node.encode(), lease=grant.ID)
        request = pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.CREATE, key=self._key, create_revision=0)],
            success=[pb.RequestOp(request_put=put)],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=self._key))],
        )
        answer = self._client.call("KV/Txn", request, pb.TxnResponse)
        if answer.succeeded:
            self.term = answer.header.revision
        else:
            leader = answer.responses[0].response_range.kvs
            # An attempt without an answer may have succeeded.
            if not leader or leader[0].lease != grant.ID:
                self._revoke(grant.ID)
                return False
            self.term = leader[0].mod_revision
        self._lease = lease
        self._thread = threading.Thread(target=self._keep, args=(lease,), name="cluster lease", daemon=True)
        self._thread.start()
        return True

    def holds(self) -> bool:
        """Return True if no other node can be active: check it after the last wait, before a read is answered."""
        return self._lease is not None and self._lease.holds(self._clock())

    def resign(self) -> None:
        """End the lease: another node may become active immediately. Without an answer the lease expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._lease is not None:
            self._lease.ended = True
            self._revoke(self._lease.lease)

    def leader(self) -> str | None:
        """Return the name of the active node; None if there is none. Raises UnavailableError, RefusedError."""
        answer = self._client.call("KV/Range", pb.RangeRequest(key=self._key), pb.RangeResponse)
        return answer.kvs[0].value.decode() if answer.kvs else None

    def _keep(self, lease: LeaseClock) -> None:
        """Keep the lease alive until it ends; runs in the thread."""
        pause_s = lease.interval_s
        while not self._ended.wait(pause_s):
            sent_ms = self._clock()
            try:
                ttl_s = self._client.keep_alive(lease.lease, deadline_s=lease.deadline_s)
            except (UnavailableError, RefusedError) as error:
                # Continue after the local deadline: etcd's time may be longer, and the lease is then valid again.
                _log.warning("the lease of the active node was not renewed: %s", error)
                pause_s = 0.05
                continue
            lease.kept(sent_ms, ttl_s)
            if lease.ended:
                _log.error("the lease of the active node has ended")
                self._on_lost()
                return
            pause_s = lease.interval_s

    def _revoke(self, lease: int) -> None:
        try:
            self._client.once("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)
        except (UnavailableError, RefusedError) as error:
            _log.info("a lease was not revoked and will expire: %s", error)

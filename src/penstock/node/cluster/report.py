"""The report of a member in etcd, from which the list of members is made, and which finds two nodes with one id."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from penstock.cluster.client import EtcdClient
from penstock.cluster.log import is_full
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import RefusedError, UnavailableError
from penstock.node.cluster.state import decode_object, member_key

__all__ = ["INTERVAL_S", "MemberReport"]

_log = logging.getLogger("penstock.cluster")

INTERVAL_S: Final = 1.0
"""Seconds between two reports of a node."""
_LEASE_S: Final = 5
"""Seconds after which a member that does not report itself is not listed any more."""


class MemberReport:
    """The report of ``node``. ``location``: host and data directory, which differ also between nodes with the same
    id."""

    def __init__(self, client: EtcdClient, prefix: str, node: str, location: str) -> None:
        self.duplicate_at: str | None = None
        """Host and data directory of another node with this id, which reports itself."""
        self._client = client
        self._key = member_key(prefix, node)
        self._node = node
        self._location = location
        self._lease: int | None = None
        self._put_s = 0.0
        self._revision = 0
        """Revision of the last report in etcd; 0: there is none."""

    @property
    def is_due(self) -> bool:
        """Whether the next report is to be put."""
        return time.monotonic() - self._put_s > INTERVAL_S

    def hasten(self) -> None:
        """Make the next report due: something has changed."""
        self._put_s = 0.0

    def put(self, report: Mapping[str, Any], *, active: bool) -> None:
        """Put ``report`` into the list of members, for a standby only if no other node has this id. Raises
        UnavailableError, RefusedError."""
        self._put_s = time.monotonic()
        if self._lease is None or self._client.keep_alive(self._lease, deadline_s=1.0) <= 0:
            grant = pb.LeaseGrantRequest(TTL=_LEASE_S)
            self._lease = self._client.call("Lease/LeaseGrant", grant, pb.LeaseGrantResponse, within_s=1.0).ID
        value = json.dumps({"node": self._node, **report, "location": self._location}).encode()
        put = pb.PutRequest(key=self._key, value=value, lease=self._lease)
        unchanged = pb.Compare(target=pb.Compare.MOD, key=self._key, mod_revision=self._revision)
        request = pb.TxnRequest(
            compare=[] if active else [unchanged],
            success=[pb.RequestOp(request_put=put)],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=self._key))],
        )
        try:
            answer = self._client.call("KV/Txn", request, pb.TxnResponse, within_s=1.0)
        except RefusedError as error:
            if not is_full(error):
                raise  # otherwise the earlier report remains, and the active node reports the reason
        else:
            self._answered(answer)

    def remove(self) -> None:
        """Remove the report, at the end of the node."""
        if self._lease is None:
            return
        try:
            self._client.once("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease), pb.LeaseRevokeResponse)
        except (UnavailableError, RefusedError) as error:
            _log.info("the list of members is not updated yet: %s", error)

    def _answered(self, answer: pb.TxnResponse) -> None:
        """Handle the answer to a report. An earlier process of this node may have left one, and another node may have
        this id by mistake."""
        self.duplicate_at = None
        if answer.succeeded:
            self._revision = answer.header.revision
            return
        found = answer.responses[0].response_range.kvs
        location = _location_of(found[0].value) if found else None
        if location in {None, self._location}:
            self._revision = found[0].mod_revision if found else 0
            self.hasten()
        else:
            self.duplicate_at = location


def _location_of(value: bytes) -> str | None:
    report = decode_object(value)
    location = report.get("location", report.get("place"))  # "place": of earlier versions
    return None if location is None else str(location)

"""Requests to hand over: keys in etcd that a command puts and the active node reads, and their audit entries."""

from __future__ import annotations

import getpass
import os
import socket
from functools import partial
from typing import Final

from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.node.cluster.process import write_in_time
from penstock.node.config.cluster import ClusterSection
from penstock.node.http import append_audit_entry
from penstock.runtime.observability.audit import AuditTrail

__all__ = ["HandoverRequests", "handover_key", "handover_user_key", "request_handover"]

MAX_USER: Final = 256
"""Maximum characters of the user of a handover in the audit trail."""


class HandoverRequests:
    """Requests to hand over, as the active node reads them."""

    def __init__(self, client: EtcdClient, section: ClusterSection) -> None:
        self._client = client
        self._section = section

    def is_requested(self, term: int) -> bool:
        """Return whether the active node of ``term`` is to hand over. Raises UnavailableError, RefusedError."""
        request = pb.RangeRequest(key=handover_key(self._section.prefix))
        answer = self._client.once("KV/Range", request, pb.RangeResponse)
        return bool(answer.kvs) and answer.kvs[0].value == str(term).encode()

    def record(self, trail: AuditTrail) -> None:
        """Write an entry of the audit trail for the request, whose user is the one that the command reported. Raises
        UnavailableError, RefusedError."""
        section = self._section
        first, last = handover_key(section.prefix), handover_user_key(section.prefix)
        request = pb.RangeRequest(key=first, range_end=last + b"\0")
        found = {entry.key: entry for entry in self._client.once("KV/Range", request, pb.RangeResponse).kvs}
        asked, user = found.get(first), found.get(last)
        if asked is None or user is None or user.mod_revision != asked.mod_revision:
            user = None  # a command of an earlier version puts none, and that of an earlier handover is still there
        row = {
            "server": "node",
            "method": "handover",
            "credential": "etcd",
            "address": "",
            "user": user.value.decode(errors="replace")[:MAX_USER] if user is not None else "",
            "parameters": {"cluster": section.name, "node": section.node},
            "result": True,
        }
        write_in_time(partial(append_audit_entry, trail, row))  # a hung disk is a reason for it


def request_handover(section: ClusterSection, client: EtcdClient, term: int) -> None:
    """Request that the active node of ``term`` hands over. Raises UnavailableError, RefusedError."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    user = f"{user}@{socket.gethostname()}"
    puts = [
        pb.PutRequest(key=handover_user_key(section.prefix), value=user.encode()),
        pb.PutRequest(key=handover_key(section.prefix), value=str(term).encode()),
    ]
    request = pb.TxnRequest(success=[pb.RequestOp(request_put=put) for put in puts])
    client.call("KV/Txn", request, pb.TxnResponse)


def handover_key(prefix: str) -> bytes:
    """Key of the term that is to hand over."""
    return f"{prefix}handover".encode()


def handover_user_key(prefix: str) -> bytes:
    """Key of the user who requested the handover, of the same revision."""
    return f"{prefix}handover-user".encode()

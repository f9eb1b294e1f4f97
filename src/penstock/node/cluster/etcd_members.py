"""The members of etcd, as a node reaches each of them: calls use the members that answer, whatever the others do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.cluster.client import EtcdClient, EtcdStatus
from penstock.console.cluster import etcd_reasons
from penstock.console.snapshots import EtcdSnapshot, Reason, Severity
from penstock.node.cluster.state import etcd_snapshot

__all__ = ["EtcdMembers"]

_log = logging.getLogger("penstock.cluster")

LOOK_S: Final = 2.0
"""Seconds between two requests to each member."""
SILENT_S: Final = 10.0
"""Seconds without an answer after which a member needs attention: a busy one may be late."""


class EtcdMembers:
    """Requests the status of each member in a thread, from :meth:`start` to :meth:`close`."""

    def __init__(self, client: EtcdClient) -> None:
        self.reasons: tuple[Reason, ...] = ()
        """Warnings about members, with the next action."""
        self.used_bytes: dict[str, int] = {}
        """Size of the database of each member, by endpoint, if it is known."""
        self._client = client
        self._answered_s: dict[str, float] = {}
        """When each endpoint answered last, or the first request to it."""
        self._silent: frozenset[str] = frozenset()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to request."""
        self._thread = threading.Thread(target=self._run, name="etcd members", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for the answers to the last requests."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def metric_rows(self) -> Iterator[tuple[Sequence[str], Mapping[str, int]]]:
        """Return the metrics of each endpoint."""
        for endpoint in self._client.endpoints:
            yield [endpoint], {"up": int(endpoint not in self._silent)}

    def look(self) -> None:
        """Request the status of each member once."""
        found: list[EtcdSnapshot] = []
        for endpoint, status in zip(self._client.endpoints, self._client.statuses(), strict=True):
            now_s = time.monotonic()
            if isinstance(status, EtcdStatus) or endpoint not in self._answered_s:
                self._answered_s[endpoint] = now_s
            late = not isinstance(status, EtcdStatus) and now_s - self._answered_s[endpoint] < SILENT_S
            found.append(EtcdSnapshot(endpoint) if late else etcd_snapshot(endpoint, status))
        self.used_bytes = {each.endpoint: each.used_bytes for each in found if each.used_bytes is not None}
        silent = frozenset(each.endpoint for each in found if each.problem is not None)
        for endpoint in sorted(self._silent - silent):
            _log.info("etcd %s answers again", endpoint)
        # A database that is full stops commits, which the active node reports as the reason why it is not ready.
        self.reasons = tuple(each for each in etcd_reasons(found) if each.severity is Severity.WARNING)
        for each in found:
            if each.endpoint in silent - self._silent:
                _log.warning("etcd %s does not answer: %s", each.endpoint, each.problem)
        self._silent = silent

    def _run(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(LOOK_S)

"""The rules for two nodes with keys that are deleted and expire."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.statestore.hlc import Hlc
from tests.simulation.cluster.history import ClusterHistory, HistoryEnded
from tests.simulation.history import GET, Operation, Violation

__all__ = ["MqttClusterHistory"]


class MqttClusterHistory(ClusterHistory):
    """As :class:`ClusterHistory`. After a backup of etcd was restored, the history ends with the next election: which
    of the acknowledged messages the elected node has is not known here."""

    def active(self, node: str, term: int, records: Mapping[bytes, Hlc], now_ms: int) -> None:
        """``node`` was elected, and has recovered ``records`` with their versions: every key that was shown to a client
        is among them, unless it can have been removed."""
        self.note(f"{node} is active in term {term}")
        self.elections += 1
        if self._restored_ms is not None:
            raise HistoryEnded("commits may be lost with the restore")
        for key, shown in self._newest.items():
            found = records.get(key)
            if found is None:
                if self._may_be_removed(Operation(GET, key), shown, now_ms + 1):
                    continue
            elif shown.version is None or found >= shown.version:
                continue
            raise Violation(f"{node} has recovered {found} of {key!r}, and {shown.version} of {shown} was shown")

    def answer(self, operation: Operation, payload: bytes, version: Hlc | None, now_ms: int) -> None:
        # The clock of expiry times has whole milliseconds, which begin at other times than those of the true time.
        super().answer(operation, payload, version, now_ms + 1)

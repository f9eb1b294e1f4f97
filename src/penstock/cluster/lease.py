"""The time for which a node may rely on its leadership, as decisions without etcd.

etcd measures a lease from the receipt of a keep-alive; the node measures a shorter time, from before it sent the
keep-alive: while :meth:`LeaseClock.holds` returns True, the lease has not expired in etcd. The clock must run while the
machine is suspended (``CLOCK_BOOTTIME``). Elections of etcd only extend leases.
"""

from __future__ import annotations

__all__ = ["LeaseClock"]


class LeaseClock:
    """The lease ``lease`` with ``ttl_s`` seconds, granted by a request sent at ``sent_ms``. Instants in ms.

    A tenth of the time is subtracted for clocks that run at different rates.
    """

    def __init__(self, lease: int, ttl_s: int, sent_ms: int) -> None:
        self.lease = lease
        self.ttl_s = ttl_s
        self.ended = False
        """True after etcd reported the end of the lease, which is then never valid again."""
        self._until_ms = 0
        self.kept(sent_ms, ttl_s)

    @property
    def interval_s(self) -> float:
        """Pause between keep-alives."""
        return self.ttl_s / 3

    @property
    def deadline_s(self) -> float:
        """Deadline of a keep-alive, short enough to leave time for further attempts."""
        return self.ttl_s / 4

    def kept(self, sent_ms: int, ttl_s: int) -> None:
        """Handle the answer ``ttl_s`` (0 or less: the lease has ended) to a keep-alive sent at ``sent_ms``."""
        if ttl_s <= 0:
            self.ended = True
        else:
            self._until_ms = max(self._until_ms, sent_ms + ttl_s * 900)

    def holds(self, now_ms: int) -> bool:
        """Return True if the lease cannot have expired. Call it after the last wait and before the read that it allows.

        If it may have expired, but a later keep-alive is answered, it had not expired and is valid again.
        """
        return not self.ended and now_ms < self._until_ms

    def left_ms(self, now_ms: int) -> int:
        """Return the milliseconds for which the lease is valid without another keep-alive."""
        return 0 if self.ended else max(0, self._until_ms - now_ms)

"""The time for which a node may count on its leadership, without etcd.

etcd counts a lease from when it has received a keep-alive; this side counts from before it sent it, and less: the lease
has not expired in etcd while :meth:`LeaseClock.holds`. The clock must run while the machine is suspended
(``CLOCK_BOOTTIME``). Etcd's own elections only extend leases.
"""

from __future__ import annotations

__all__ = ["LEAST_TTL_S", "LeaseClock"]

LEAST_TTL_S = 2
"""etcd grants no shorter lease."""


class LeaseClock:
    """The lease ``lease`` with ``ttl_s`` seconds, granted by a request sent at ``sent_ms``. Instants in ms.

    A tenth of the time is subtracted for clocks that run at different rates.
    """

    def __init__(self, lease: int, ttl_s: int, sent_ms: int) -> None:
        self.lease = lease
        self.ttl_s = ttl_s
        self.ended = False
        """etcd said so: the lease is never valid again."""
        self._until_ms = 0
        self.kept(sent_ms, ttl_s)

    @property
    def interval_s(self) -> float:
        """Pause between keep-alives."""
        return self.ttl_s / 3

    @property
    def deadline_s(self) -> float:
        """Deadline of a keep-alive: one that fails leaves time for others."""
        return self.ttl_s / 4

    def kept(self, sent_ms: int, ttl_s: int) -> None:
        """A keep-alive that was sent at ``sent_ms`` was answered with ``ttl_s`` (0 or less: the lease has ended)."""
        if ttl_s <= 0:
            self.ended = True
        else:
            self._until_ms = max(self._until_ms, sent_ms + ttl_s * 900)

    def holds(self, now_ms: int) -> bool:
        """Whether the lease cannot have expired. Call it after the last wait and before the read that it allows.

        If it may have expired and a later keep-alive is answered, it had not, and holds again.
        """
        return not self.ended and now_ms < self._until_ms

    def left_ms(self, now_ms: int) -> int:
        """Milliseconds for which the lease holds without another keep-alive."""
        return 0 if self.ended else max(0, self._until_ms - now_ms)

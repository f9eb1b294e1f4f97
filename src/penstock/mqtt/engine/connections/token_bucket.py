"""A bound on how fast one client publishes."""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """A bucket that ``per_second`` tokens a second flow into, up to ``burst``; a message takes one."""

    __slots__ = ("_burst", "_credit", "_per_second", "_since")

    def __init__(self, per_second: int, burst: int, now: int) -> None:
        self._per_second = per_second
        self._burst = burst * 1000
        self._credit = self._burst
        """In thousandths of a token, so that milliseconds times rate is added without a division."""
        self._since = now

    def take(self, now: int) -> bool:
        """Take a token; False when there was none. Then the debt grows all the same, down to one more burst."""
        credit = self._credit
        if now != self._since:
            credit = min(self._burst, credit + (now - self._since) * self._per_second)
            self._since = now
        enough = credit >= 1000
        self._credit = max(credit - 1000, -self._burst)
        return enough

    def give_back(self) -> None:
        """The message was refused: it costs nothing."""
        self._credit += 1000

    def ready_at(self, now: int) -> int:
        """When there is a token again."""
        missing = 1000 - self._credit - (now - self._since) * self._per_second
        return now if missing <= 0 else now - (-missing // self._per_second)

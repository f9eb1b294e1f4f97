"""Hybrid logical clocks: the versions, time stamps and fencing tokens of the state store.

A clock value is ``{wall ms since the epoch}:{counter}:{node id}``. Values are ordered by wall clock, then counter, then
node id byte by byte. Nothing here reads a clock: the time comes in as an argument.

Source: state store protocol, "Versioning and hybrid logical clocks"; Kulkarni et al., "Logical Physical Clocks" (2014).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.errors import RemoteProtocolError

__all__ = [
    "MAX_COUNTER",
    "MAX_DRIFT_MS",
    "MAX_LEAD_MS",
    "PADDED",
    "PLAIN",
    "Hlc",
    "parse",
]

MAX_DRIFT_MS: Final = 60_000
"""How far ahead of the local clock a value may be; one millisecond more is refused."""

MAX_COUNTER: Final = 2**31 - 1
"""The largest counter ever made here: the .NET SDK reads a signed 32-bit number, the others 64 bits."""

MAX_LEAD_MS: Final = 8
"""How far versions of the store may lead its wall clock, so that each has a millisecond of its own."""

PLAIN: Final = "%d:%d:%s"
"""How the document prints a value, ``1696374425000:1:StateStore``."""
PADDED: Final = "%015d:%05d:%s"
"""How the SDKs print it, 15 and 5 digits: ``001696374425000:00001:StateStore``."""

_MAX_NUMBER: Final = 2**64 - 1
_MAX_NUMBER_DIGITS: Final = 20


class Hlc(NamedTuple):
    """One value of a hybrid logical clock.

    A tuple, so that comparing, hashing and sorting are the tuple's own and cost nothing: text compares by code point,
    which for UTF-8 is byte by byte.
    """

    wall_ms: int
    counter: int
    node: str

    def __str__(self) -> str:
        """As the document prints it."""
        return PLAIN % self

    def padded(self) -> str:
        """As the SDKs print it."""
        return PADDED % self

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands among the versions of one store: these differ in wall clock and counter.

        The node id of who asks with a version does not matter.
        """
        return self[:2]

    def drift_ms(self, now_ms: int) -> int:
        """How far this value is ahead of ``now_ms``; negative where it is behind."""
        return self.wall_ms - now_ms

    def is_too_far_ahead(self, now_ms: int) -> bool:
        """Whether it is more than a minute ahead of ``now_ms``."""
        return self.wall_ms - now_ms > MAX_DRIFT_MS

    def following(self, other: Hlc | None, now_ms: int) -> Hlc:
        """The next version of the store: greater than this one and than ``other``, never behind ``now_ms``.

        It holds for every ``other``, also one of the same node id. The counter is 1, as in the document's example,
        whether the request came within the millisecond of its time stamp or later: clients compare the counters of two
        renewals of a lease. So further versions within a millisecond take the next ones, as long as that leads the
        wall clock by at most ``MAX_LEAD_MS``; in a burst, and behind a clock that is ahead, the counter counts. Where
        it would overflow the wall clock moves on instead.
        """
        wall, counter, node = self
        if other is not None and other > self:
            wall, counter, _ = other
        if now_ms > wall:
            return _new(Hlc, (now_ms, 1, node))
        if counter and (wall < now_ms + MAX_LEAD_MS or counter >= MAX_COUNTER):
            return _new(Hlc, (wall + 1, 1, node))
        return _new(Hlc, (wall, counter + 1, node))

    def raised_to(self, other: Hlc) -> Hlc:
        """This clock once it has seen ``other``, which is greater."""
        return _new(Hlc, (other[0], other[1], self[2]))

    def ticked(self, now_ms: int) -> Hlc:
        """This node's clock when it sends something: the rule of the clients for their time stamps."""
        if now_ms > self.wall_ms:
            return Hlc(now_ms, 0, self.node)
        return Hlc(self.wall_ms, self.counter + 1, self.node)

    def merged(self, other: Hlc, now_ms: int) -> Hlc:
        """This node's clock after it has seen ``other``: the rule of the clients.

        Raises:
            RemoteProtocolError: the winning wall clock is more than a minute ahead of ``now_ms``, or the counter
                would overflow.
        """
        if other.node == self.node:
            return self
        if now_ms > self.wall_ms and now_ms > other.wall_ms:
            return Hlc(now_ms, 0, self.node)
        winner = max(self, other)
        if winner.is_too_far_ahead(now_ms):
            raise RemoteProtocolError(
                f"clock value {winner} is {winner.drift_ms(now_ms)} ms ahead of the local clock",
                why=f"at most {MAX_DRIFT_MS} ms are allowed between the clocks of a client and the store",
                do="synchronize the system clocks (NTP)",
            )
        if winner.counter >= MAX_COUNTER:
            raise RemoteProtocolError(f"the counter of clock value {winner} would overflow")
        return Hlc(winner.wall_ms, winner.counter + 1, self.node)


_new = tuple.__new__
"""Makes a value in half the time: for what is made once a request."""


def parse(text: str) -> Hlc | None:
    """``text`` as a clock value, with any number of leading zeros; None where it is not one.

    Numbers are unsigned 64-bit, in ASCII digits; the node id is not empty and has no colon.
    """
    parts = text.split(":", 3)
    if len(parts) != 3 or not parts[2]:
        return None
    first, second, node = parts
    if len(first) < _MAX_NUMBER_DIGITS and len(second) < _MAX_NUMBER_DIGITS:  # as every client writes them
        if first.isdigit() and second.isdigit() and first.isascii() and second.isascii():
            return Hlc(int(first), int(second), node)
        return None
    wall, counter = _number(first), _number(second)
    if wall is None or counter is None:
        return None
    return Hlc(wall, counter, parts[2])


def _number(digits: str) -> int | None:
    if not (digits.isascii() and digits.isdigit()):
        return None
    significant = digits.lstrip("0")
    if len(significant) > _MAX_NUMBER_DIGITS:
        return None
    number = int(significant or "0")
    return number if number <= _MAX_NUMBER else None

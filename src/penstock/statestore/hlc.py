"""Hybrid logical clocks: the versions, time stamps and fencing tokens of the state store.

A clock value is ``{wall ms since the epoch}:{counter}:{node id}``. Values are ordered by wall clock, then counter, then
node id byte by byte. Nothing here reads a clock: the time comes in as an argument.

Source: state store protocol, "Versioning and hybrid logical clocks"; Kulkarni et al., "Logical Physical Clocks" (2014).
"""

from __future__ import annotations

from typing import Final, final

from penstock.errors import RemoteProtocolError

__all__ = [
    "MAX_COUNTER",
    "MAX_DRIFT_MS",
    "MAX_LEAD_MS",
    "Hlc",
    "parse",
]

MAX_DRIFT_MS: Final = 60_000
"""How far ahead of the local clock a value may be; one millisecond more is refused."""

MAX_COUNTER: Final = 2**31 - 1
"""The largest counter ever made here: the .NET SDK reads a signed 32-bit number, the others 64 bits."""

MAX_LEAD_MS: Final = 8
"""How far versions of the store may lead its wall clock, so that each has a millisecond of its own."""

_MAX_NUMBER: Final = 2**64 - 1
_MAX_NUMBER_DIGITS: Final = 20
_SHORT_DIGITS: Final = 18


@final
class Hlc:
    """One value of a hybrid logical clock: wall clock in ms since the epoch, counter, node id. Never changed.

    Values compare by wall clock, then counter, then node id; text compares by code point, which for UTF-8 is byte by
    byte. A class of its own, since compiled code makes and compares one in a tenth of the time of a named tuple.
    """

    __slots__ = ("counter", "node", "wall_ms")

    def __init__(self, wall_ms: int, counter: int, node: str) -> None:
        self.wall_ms = wall_ms
        self.counter = counter
        self.node = node

    def is_before(self, other: Hlc) -> bool:
        """``self < other``, as a method that compiled code calls directly."""
        if self.wall_ms != other.wall_ms:
            return self.wall_ms < other.wall_ms
        if self.counter != other.counter:
            return self.counter < other.counter
        return self.node < other.node

    def __lt__(self, other: Hlc) -> bool:
        return self.is_before(other)

    def __gt__(self, other: Hlc) -> bool:
        return other.is_before(self)

    def __le__(self, other: Hlc) -> bool:
        return not other.is_before(self)

    def __ge__(self, other: Hlc) -> bool:
        return not self.is_before(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hlc):
            return NotImplemented
        return self.wall_ms == other.wall_ms and self.counter == other.counter and self.node == other.node

    def __hash__(self) -> int:
        return hash((self.wall_ms, self.counter, self.node))

    def __reduce__(self) -> tuple[type[Hlc], tuple[int, int, str]]:
        return Hlc, (self.wall_ms, self.counter, self.node)

    def __repr__(self) -> str:
        return f"Hlc(wall_ms={self.wall_ms}, counter={self.counter}, node={self.node!r})"

    def __str__(self) -> str:
        """As the document prints it: ``1696374425000:1:StateStore``."""
        return f"{self.wall_ms}:{self.counter}:{self.node}"

    def padded(self) -> str:
        """As the SDKs print it, with 15 and 5 digits: ``001696374425000:00001:StateStore``."""
        wall, counter = str(self.wall_ms), str(self.counter)
        return _ZEROS[len(wall) :] + wall + ":" + _ZEROS[10 + len(counter) :] + counter + ":" + self.node

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands among the versions of one store: these differ in wall clock and counter.

        The node id of who asks with a version does not matter.
        """
        return self.wall_ms, self.counter

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
        wall, counter = self.wall_ms, self.counter
        if other is not None and self.is_before(other):
            wall, counter = other.wall_ms, other.counter
        if now_ms > wall:
            return Hlc(now_ms, 1, self.node)
        if counter and (wall < now_ms + MAX_LEAD_MS or counter >= MAX_COUNTER):
            return Hlc(wall + 1, 1, self.node)
        return Hlc(wall, counter + 1, self.node)

    def raised_to(self, other: Hlc) -> Hlc:
        """This clock once it has seen ``other``, which is greater."""
        return Hlc(other.wall_ms, other.counter, self.node)

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
        winner = other if self.is_before(other) else self
        if winner.is_too_far_ahead(now_ms):
            raise RemoteProtocolError(
                f"clock value {winner} is {winner.drift_ms(now_ms)} ms ahead of the local clock",
                why=f"at most {MAX_DRIFT_MS} ms are allowed between the clocks of a client and the store",
                do="synchronize the system clocks (NTP)",
            )
        if winner.counter >= MAX_COUNTER:
            raise RemoteProtocolError(f"the counter of clock value {winner} would overflow")
        return Hlc(winner.wall_ms, winner.counter + 1, self.node)


_ZEROS: Final = "0" * 15


def parse(text: str) -> Hlc | None:
    """``text`` as a clock value, with any number of leading zeros; None where it is not one.

    Numbers are unsigned 64-bit, in ASCII digits; the node id is not empty and has no colon.
    """
    first = text.find(":")
    second = text.find(":", first + 1)
    if 0 < first <= _SHORT_DIGITS and 1 < second - first <= _SHORT_DIGITS + 1:  # as every client writes it
        wall, counter, node = text[:first], text[first + 1 : second], text[second + 1 :]
        if wall.isdigit() and counter.isdigit() and wall.isascii() and counter.isascii():
            return None if not node or ":" in node else Hlc(int(wall), int(counter), node)
        return None
    return _parse_long(text)


def _parse_long(text: str) -> Hlc | None:
    """:func:`parse` for numbers of any length."""
    parts = text.split(":", 3)
    if len(parts) != 3 or not parts[2]:
        return None
    wall, counter = _number(parts[0]), _number(parts[1])
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

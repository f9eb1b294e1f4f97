"""Limits of network connections that apply before a byte is read. No IO: time is an argument.

A connection is unauthenticated from its acceptance until the broker accepts its CONNECT. If there are too many
unauthenticated connections, the oldest one of the address with the most of them is closed, so that a flood of idle
connections from one address closes only connections of that address.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from penstock.mqtt.transport.listener_settings import ConnectionLimits

__all__ = [
    "Abortable",
    "ConnectionLimitStats",
    "ConnectionLimiter",
    "ConnectionRefusal",
    "address_group",
]

RATES_KEPT: Final = 10_000
"""Maximum number of addresses whose connect rate is tracked; the least recently active one is removed first."""

L = TypeVar("L")


class Abortable(Protocol):
    """A connection that can be closed at once."""

    def abort(self) -> None:
        """Close at once."""
        ...


class ConnectionLimitStats:
    """Counters since the start."""

    __slots__ = ("evicted_unauthenticated", "refused_address", "refused_listener", "refused_rate")

    def __init__(self) -> None:
        self.refused_address = 0
        self.refused_listener = 0
        self.refused_rate = 0
        self.evicted_unauthenticated = 0
        """Connections closed before their CONNECT was accepted, to make room for others."""


class ConnectionRefusal(Enum):
    """Reason for refusing a connection: reason code and text."""

    LISTENER = (0x97, "too many connections on this listener")
    ADDRESS = (0x97, "too many connections from this address")
    RATE = (0x9F, "too many connections from this address in a short time")

    @property
    def reason_code(self) -> int:
        """The reason code of an MQTT 5.0 CONNACK."""
        return self.value[0]

    @property
    def reason(self) -> str:
        """The reason as text, for the log."""
        return self.value[1]


class ConnectionLimiter(Generic[L]):
    """Counts connections by address. ``L`` is the type of a connection; it must be hashable.

    Call :meth:`refusal`, then :meth:`opened`; later :meth:`authenticated`, and at the end :meth:`closed`.
    """

    def __init__(self, limits: ConnectionLimits, stats: ConnectionLimitStats, *, max_connections: int = 0) -> None:
        self.limits = limits
        self.max_connections = max_connections
        self._stats = stats
        self._count = 0
        self._by_address: dict[str, int] = {}
        self._unauthenticated: dict[str, dict[L, None]] = {}
        self._unauthenticated_count = 0
        self._tokens: OrderedDict[str, tuple[float, int]] = OrderedDict()

    @property
    def connections(self) -> int:
        """The number of connections."""
        return self._count

    @property
    def unauthenticated(self) -> int:
        """The number of connections without an accepted CONNECT."""
        return self._unauthenticated_count

    def refusal(self, group: str, now: int) -> ConnectionRefusal | None:
        """Return why another connection of this address is refused; None if it is allowed. ``now`` in ms."""
        limits = self.limits
        if self.max_connections and self._count >= self.max_connections:
            self._stats.refused_listener += 1
            return ConnectionRefusal.LISTENER
        most = limits.max_connections_per_address
        if most and self._by_address.get(group, 0) >= most:
            self._stats.refused_address += 1
            return ConnectionRefusal.ADDRESS
        if limits.connect_rate_per_address and not self._take_token(group, now):
            self._stats.refused_rate += 1
            return ConnectionRefusal.RATE
        return None

    def opened(self, link: L, group: str) -> L | None:
        """Add a connection. The caller must close the returned one, to make room."""
        self._count += 1
        self._by_address[group] = self._by_address.get(group, 0) + 1
        most = self.limits.max_unauthenticated
        victim = None
        if most and self._unauthenticated_count >= most:
            crowd, links = max(self._unauthenticated.items(), key=lambda item: len(item[1]))
            victim = next(iter(links))
            # Removed immediately, although it ends later, so that other connections of this turn do not choose it
            # again.
            self.authenticated(victim, crowd)
            self._stats.evicted_unauthenticated += 1
        self._unauthenticated.setdefault(group, {})[link] = None
        self._unauthenticated_count += 1
        return victim

    def authenticated(self, link: L, group: str) -> None:
        """Register that the CONNECT of the connection was accepted."""
        found = self._unauthenticated.get(group)
        if found is not None and link in found:
            del found[link]
            self._unauthenticated_count -= 1
            if not found:
                del self._unauthenticated[group]

    def closed(self, link: L, group: str) -> None:
        """Remove a closed connection."""
        self.authenticated(link, group)
        self._count -= 1
        left = self._by_address[group] - 1
        if left:
            self._by_address[group] = left
        else:
            del self._by_address[group]

    def _take_token(self, group: str, now: int) -> bool:
        """Take a token from the address's bucket; False if it is empty."""
        rate = self.limits.connect_rate_per_address
        burst = float(self.limits.connect_burst_per_address or rate)
        tokens, at = self._tokens.pop(group, (burst, now))
        tokens = min(burst, tokens + (now - at) * rate / 1000)
        allowed = tokens >= 1
        self._tokens[group] = (tokens - 1 if allowed else tokens, now)
        if len(self._tokens) > RATES_KEPT:
            self._tokens.popitem(last=False)
        return allowed


def address_group(address: str) -> str:
    """Return the key under which an address is counted: for IPv6 its /64, for an IPv4-mapped address the IPv4
    address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed.packed[:8] + bytes(8), 64)))

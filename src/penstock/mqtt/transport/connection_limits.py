"""Who may open a network connection: limits that hold before a byte was read. Pure: time comes in.

A connection is a stranger from the moment it is accepted until the broker has accepted its CONNECT. When there are too
many strangers, the oldest one of the address that has most of them goes: a flood of silent connections from one
address costs that address its own, and nobody else's.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

__all__ = ["Admission", "AdmissionLimits", "AdmissionStats", "Refusal", "address_group"]

RATES_KEPT: Final = 10_000
"""Addresses whose connect rate is remembered; the one that was quiet longest is forgotten first."""

L = TypeVar("L")


@dataclass(slots=True, kw_only=True)
class AdmissionLimits:
    """Bounds of network connections, of one listener or of all. 0: no bound of this kind."""

    max_connections_per_address: int = 0
    """Connections from one address (IPv6: from one /64); a further one is answered 0x97."""
    max_unauthenticated: int = 2_000
    """Connections without an accepted CONNECT; the oldest one of the address with most of them makes room."""
    connect_rate_per_address: int = 0
    """Connections a second from one address; beyond it 0x9F."""
    connect_burst_per_address: int = 0
    """Connections that may come at once after a pause; 0: those of one second."""


class AdmissionStats:
    """Counters since the start."""

    __slots__ = ("refused_address", "refused_listener", "refused_rate", "strangers_cut")

    def __init__(self) -> None:
        self.refused_address = 0
        self.refused_listener = 0
        self.refused_rate = 0
        self.strangers_cut = 0
        """Connections that were cut before their CONNECT, to make room."""


class Refusal(Enum):
    """Why a connection may not come in: the reason code that says so, and words."""

    LISTENER = (0x97, "too many connections on this listener")
    ADDRESS = (0x97, "too many connections from this address")
    RATE = (0x9F, "too many connections from this address in a short time")

    @property
    def reason_code(self) -> int:
        """What a CONNACK of MQTT 5.0 says."""
        return self.value[0]

    @property
    def reason(self) -> str:
        """The same in words, for the log."""
        return self.value[1]


class Admission(Generic[L]):
    """The connections that are there, by address. ``L`` is what stands for one; it must be hashable.

    Ask :meth:`refusal`, then say :meth:`opened`; later :meth:`authenticated`, and at the end :meth:`closed`.
    """

    def __init__(self, limits: AdmissionLimits, stats: AdmissionStats, *, max_connections: int = 0) -> None:
        self.limits = limits
        self.max_connections = max_connections
        self._stats = stats
        self._count = 0
        self._by_address: dict[str, int] = {}
        self._strangers: dict[str, dict[L, None]] = {}
        self._strangers_count = 0
        self._tokens: OrderedDict[str, tuple[float, int]] = OrderedDict()

    @property
    def connections(self) -> int:
        """How many there are."""
        return self._count

    @property
    def strangers(self) -> int:
        """How many of them have no accepted CONNECT."""
        return self._strangers_count

    def refusal(self, group: str, now: int) -> Refusal | None:
        """Why one more from this address may not come in; None where it may. ``now`` in ms."""
        limits = self.limits
        if self.max_connections and self._count >= self.max_connections:
            self._stats.refused_listener += 1
            return Refusal.LISTENER
        most = limits.max_connections_per_address
        if most and self._by_address.get(group, 0) >= most:
            self._stats.refused_address += 1
            return Refusal.ADDRESS
        if limits.connect_rate_per_address and not self._take(group, now):
            self._stats.refused_rate += 1
            return Refusal.RATE
        return None

    def opened(self, link: L, group: str) -> L | None:
        """It came in, as a stranger. What is returned must be cut to make room for it."""
        self._count += 1
        self._by_address[group] = self._by_address.get(group, 0) + 1
        most = self.limits.max_unauthenticated
        victim = None
        if most and self._strangers_count >= most:
            crowd = max(self._strangers.values(), key=len)
            victim = next(iter(crowd))
            self._stats.strangers_cut += 1
        self._strangers.setdefault(group, {})[link] = None
        self._strangers_count += 1
        return victim

    def authenticated(self, link: L, group: str) -> None:
        """Its CONNECT was accepted."""
        found = self._strangers.get(group)
        if found is not None and link in found:
            del found[link]
            self._strangers_count -= 1
            if not found:
                del self._strangers[group]

    def closed(self, link: L, group: str) -> None:
        """It is gone."""
        self.authenticated(link, group)
        self._count -= 1
        left = self._by_address[group] - 1
        if left:
            self._by_address[group] = left
        else:
            del self._by_address[group]

    def _take(self, group: str, now: int) -> bool:
        """Whether the bucket of the address has a token; it fills with time."""
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
    """What counts as one address: of IPv6 the /64 that one site gets, with IPv4 inside IPv6 taken as IPv4."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed.packed[:8] + bytes(8), 64)))

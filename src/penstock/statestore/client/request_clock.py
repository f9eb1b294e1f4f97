"""The time stamps of a client's requests, and what its clock looks like from the store.

Every request carries a hybrid logical clock value, greater than all that this client has sent or seen. The store
refuses one that is more than a minute ahead of its own clock, and nothing else is asked of it: a clock behind is fine.

With ``server_clock`` the stamps hold no time of this machine at all: they follow the newest version seen from the
store, so they keep the order of cause and effect and can never be ahead of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from penstock.errors import RemoteProtocolError
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc, parse

__all__ = ["RequestClock"]

_log = logging.getLogger("penstock.statestore")

_WARN_AGAIN_MS: Final = 3_600_000
"""A wrong clock stays wrong: said once an hour."""


class RequestClock:
    """The clock of one client; ``wall_ms`` is its machine's, ``node`` its id in clock values."""

    def __init__(self, node: str, wall_ms: Callable[[], int], *, server_clock: bool = False) -> None:
        self._wall_ms = wall_ms
        self._server_clock = server_clock
        self._value = Hlc(0, 0, node)
        self._newest: Hlc | None = None
        """The newest version seen from the store."""
        self._newest_at = 0
        self._warned_at: int | None = None

    @property
    def behind_ms(self) -> int | None:
        """How far the newest version of the store was ahead of this machine's clock when it was seen; None: none seen.

        A lower bound of how far the store's clock is ahead, or that of another of its clients. Negative values say
        little: a version may be old.
        """
        return None if self._newest is None else self._newest.wall_ms - self._newest_at

    def stamp(self) -> Hlc:
        """The stamp of the next request."""
        now_ms = 0 if self._server_clock else self._wall_ms()
        if not self._server_clock and self._value.wall_ms - now_ms > MAX_DRIFT_MS:
            # The machine's clock was set back: going on from the old time would be refused until it comes round again.
            # Nothing is lost, since the store gives the versions and always greater ones.
            self._value = Hlc(0, 0, self._value.node)
        self._value = self._value.ticked(now_ms)
        return self._value

    def saw(self, text: str | None) -> Hlc | None:
        """The version in ``text``, which moves this clock on; one that is more than a minute ahead of it does not."""
        version = parse(text) if text is not None else None
        if version is None:
            return None
        now_ms = self._wall_ms()
        if self._newest is None or version > self._newest:
            self._newest, self._newest_at = version, now_ms
        if self._server_clock:
            if version > self._value:
                self._value = Hlc(version.wall_ms, version.counter, self._value.node)
            return version
        try:
            self._value = self._value.merged(version, now_ms)
        except RemoteProtocolError as error:
            # The answer is true all the same.
            if self._warned_at is None or now_ms - self._warned_at > _WARN_AGAIN_MS:
                self._warned_at = now_ms
                _log.warning("%s", error)
        return version

    def skew(self) -> tuple[int | None, str]:
        """Why a time stamp was too far ahead: how many ms this clock is ahead (None: not known), and that in words."""
        if self._newest is None:
            return None, (
                f"this machine's clock is more than {MAX_DRIFT_MS // 1000} s ahead of the store's,"
                " or the store's is behind"
            )
        ahead_ms = self._wall_ms() - self._newest.wall_ms
        return ahead_ms, (
            f"this machine's clock is {ahead_ms / 1000:.0f} s ahead of the newest version seen from the store"
            f" ({self._newest}); at most {MAX_DRIFT_MS // 1000} s are allowed"
        )

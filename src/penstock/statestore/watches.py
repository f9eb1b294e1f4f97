"""The observations of one client: begun and ended at the store, restored after a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from penstock.errors import PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.statestore.binding import key_of_notification
from penstock.statestore.codec import ReplyKind, decode_notification, decode_reply
from penstock.statestore.errors import InvalidRequestError, StateStoreError, as_text
from penstock.statestore.exchange import Exchange
from penstock.statestore.hlc import Hlc
from penstock.statestore.observation import Change, Entry, Observation, Watched

__all__ = ["Watches"]

_log = logging.getLogger("penstock.statestore")

_PAUSE_S: Final = 0.1
"""Wait before an observation that could not be restored is tried again."""

_STOP_TIMEOUT_S: Final = 2.0
"""An observation ends with the connection anyway, so nobody waits long for the answer to STOP."""


class Watches:
    """The observed keys; ``read`` is the client's GET. ``open``: whether the client may still ask for something."""

    def __init__(self, exchange: Exchange, read: Callable[[bytes], Awaitable[Entry | None]]) -> None:
        self.open = False
        self._exchange = exchange
        self._read = read
        self._watched: dict[bytes, Watched] = {}
        self._resumes = True
        """Whether the store may be able to send what an observer missed; found out at the first reconnect."""

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes) -> AsyncIterator[Observation]:
        """Observe ``key`` inside the block."""
        watched = self._watched.setdefault(key, Watched(key))
        watched.users += 1
        observation = Observation()
        try:
            async with watched.lock:
                if not watched.active:
                    await self._begin(watched)
                observation.entry = watched.entry
                watched.observations.add(observation)
            yield observation
        finally:
            watched.observations.discard(observation)
            watched.users -= 1
            await self._end(watched)

    async def _begin(self, watched: Watched) -> None:
        if watched.active and watched.version is not None and await self._resume(watched.key, watched.version):
            return
        payload, _ = await self._exchange.call([b"KEYNOTIFY", watched.key])
        if decode_reply(payload).kind not in (ReplyKind.OK, ReplyKind.INTEGER):
            raise RemoteProtocolError(f"state store: answer to KEYNOTIFY was {payload[:100]!r}")
        # What there is now is where the differences after a reconnect are counted from.
        watched.found(await self._read(watched.key))
        watched.active = True

    async def _resume(self, key: bytes, version: Hlc) -> bool:
        """Observe again and have the store send what was missed since ``version``; False where it cannot."""
        if not self._resumes:
            return False
        try:
            await self._exchange.call([b"KEYNOTIFY", key, b"AFTER", str(version).encode()])
        except InvalidRequestError:
            self._resumes = False  # a store without the extension
            return False
        except StateStoreError:
            return False  # its history does not reach that far back
        return True

    async def _end(self, watched: Watched) -> None:
        """Stop observing where nobody is left; whoever comes meanwhile waits for the lock and begins again."""
        if _in_use(watched):
            return
        async with watched.lock:
            if watched.active and not _in_use(watched):
                watched.active = False
                if self.open:
                    with contextlib.suppress(PenstockError):
                        await self._exchange.call([b"KEYNOTIFY", watched.key, b"STOP"], timeout_s=_STOP_TIMEOUT_S)
        if not _in_use(watched):
            self._watched.pop(watched.key, None)

    def notified(self, message: Publish) -> None:
        """A notification came in."""
        key = key_of_notification(message.topic)
        watched = self._watched.get(key) if key is not None else None
        if watched is None:
            return
        try:
            operation, value = decode_notification(message.payload)
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            return
        version = self._exchange.clock.saw(message.properties.user_property("__ts"))
        watched.accept(Change(watched.key, operation, value, version))

    async def restore(self) -> None:
        """Observe again what was observed: the store dropped it with the connection. What was missed is told."""
        todo = deque(self._watched.values())
        while todo:
            watched = todo[0]
            try:
                async with watched.lock:
                    if watched.active:
                        await self._begin(watched)
            except UnavailableError as error:
                # A further reconnect starts all of this again.
                _log.warning("observation not restored yet key=%s: %s", as_text(watched.key), error.what)
                await asyncio.sleep(_PAUSE_S)
                continue
            except PenstockError as error:
                for observation in watched.observations:
                    observation.close(error)
            todo.popleft()

    def give_up(self, error: PenstockError | None) -> None:
        """No change will come any more."""
        for watched in self._watched.values():
            for observation in watched.observations:
                observation.close(error)


def _in_use(watched: Watched) -> bool:
    return watched.users > 0

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
from penstock.statestore.client.exchange import Exchange
from penstock.statestore.client.observation import Change, Entry, Observation, Watched
from penstock.statestore.codec.resp3 import ReplyKind, decode_notification, decode_reply
from penstock.statestore.errors import InvalidRequestError, StateStoreError, as_text
from penstock.statestore.hlc import Hlc

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
        self._watched: dict[tuple[bytes, bool], Watched] = {}
        self._prefixes = 0
        """How many of them are prefixes: without any, a notification is one look-up."""
        self._resumes = True
        """Whether the store may be able to send what an observer missed; found out at the first reconnect."""

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes, *, prefix: bool = False) -> AsyncIterator[Observation]:
        """Observe ``key``, or all keys that begin with it, inside the block."""
        watched = self._watched.get((key, prefix))
        if watched is None:
            watched = self._watched[key, prefix] = Watched(key, prefix=prefix)
            self._prefixes += prefix
        watched.users += 1
        observation = Observation()
        try:
            async with watched.lock:
                if prefix:
                    # A change right behind the store's answer is here before the waiter for the answer goes on; of a
                    # single key the GET behind it tells.
                    watched.observations.add(observation)
                if not watched.active:
                    await self._begin(watched)
                if not prefix:
                    observation.entry = watched.entry
                    watched.observations.add(observation)
            yield observation
        finally:
            watched.observations.discard(observation)
            watched.users -= 1
            await self._end(watched)

    async def _begin(self, watched: Watched) -> bool:
        """Observe it at the store; whether no change since it was observed before can have been missed."""
        again = watched.active
        if again and watched.version is not None and await self._resume(watched, watched.version):
            return True
        extension = "prefix-observe" if watched.prefix else None
        payload, version = await self._exchange.call(_words(watched), extension=extension)
        if decode_reply(payload).kind not in (ReplyKind.OK, ReplyKind.INTEGER):
            raise RemoteProtocolError(f"state store: answer to KEYNOTIFY was {payload[:100]!r}")
        whole = False
        if not watched.prefix:
            # What there is now is where the differences after a reconnect are counted from.
            known, entry = watched.version, await self._read(watched.key)
            watched.found(entry)
            whole = entry is not None and entry.version == known
        else:
            if again:
                watched.accept(Change(watched.key, "LOST", None, None, missed=True))
            if version is not None and (watched.version is None or version > watched.version):
                watched.version = version
        watched.active = True
        return whole

    async def _resume(self, watched: Watched, version: Hlc) -> bool:
        """Observe again and have the store send what was missed since ``version``; False where it cannot."""
        if not self._resumes:
            return False
        try:
            await self._exchange.call([*_words(watched), b"AFTER", str(version).encode()])
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
                        await self._exchange.call([*_words(watched), b"STOP"], timeout_s=_STOP_TIMEOUT_S)
        if not _in_use(watched) and self._watched.pop((watched.key, watched.prefix), None) is not None:
            self._prefixes -= watched.prefix

    def notified(self, message: Publish) -> None:
        """A notification came in."""
        key = key_of_notification(message.topic)
        if key is None:
            return
        single = self._watched.get((key, False))
        told = [] if single is None else [single]
        if self._prefixes:
            told += [w for w in self._watched.values() if w.prefix and key.startswith(w.key)]
        if not told:
            return
        try:
            operation, value = decode_notification(message.payload)
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            return
        version = self._exchange.clock.saw(message.properties.user_property("__ts"))
        for watched in told:
            watched.accept(Change(key, operation, value, version))

    async def restore(self) -> bool:
        """Observe again what was observed: the store dropped it with the connection. What was missed is told.

        True where that is every change; False where some may have been overwritten meanwhile.
        """
        todo = deque(self._watched.values())
        whole = True
        while todo:
            watched = todo[0]
            try:
                async with watched.lock:
                    if watched.active:
                        whole &= await self._begin(watched)
                        for observation in watched.observations:
                            observation.entry = watched.entry
            except UnavailableError as error:
                # A further reconnect starts all of this again.
                _log.warning("observation not restored yet key=%s: %s", as_text(watched.key), error.what)
                await asyncio.sleep(_PAUSE_S)
                continue
            except PenstockError as error:
                for observation in watched.observations:
                    observation.close(error)
            todo.popleft()
        return whole

    def give_up(self, error: PenstockError | None) -> None:
        """No change will come any more."""
        for watched in self._watched.values():
            for observation in watched.observations:
                observation.close(error)


def _words(watched: Watched) -> list[bytes]:
    return [b"KEYNOTIFY", watched.key, b"PREFIX"] if watched.prefix else [b"KEYNOTIFY", watched.key]


def _in_use(watched: Watched) -> bool:
    return watched.users > 0

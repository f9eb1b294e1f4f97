"""Observations of a client: begin and end them at the store, restore them after a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from penstock.errors import PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.statestore.binding import key_of_notification
from penstock.statestore.client.requests import RequestSender
from penstock.statestore.codec.resp3 import ReplyKind, decode_notification, decode_reply
from penstock.statestore.errors import InvalidRequestError, StateStoreError, as_text
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    from penstock.mqtt.client import MqttClient

__all__ = ["MAX_UNREAD", "Entry", "KeyChange", "Observation", "Observations", "ObservedKey", "SharedKey", "SharedKeys"]

_log = logging.getLogger("penstock.statestore")

MAX_UNREAD: Final = 10_000
"""Unread changes of an observation; beyond it the oldest are dropped and counted in ``Observation.dropped``."""
_RETRY_PAUSE_S: Final = 0.1
"""Pause before an observation that could not be restored is tried again."""
_STOP_TIMEOUT_S: Final = 2.0
"""Timeout of STOP. It is short because an observation ends with the connection anyway."""


class Entry(NamedTuple):
    """Value and version of an existing key."""

    value: bytes
    version: Hlc


class KeyChange(NamedTuple):
    """One change of an observed key.

    ``operation`` is ``SET`` with a value, or ``DELETE`` without (a deletion or an expiry). ``version`` is None only
    for a deletion that happened while the client was disconnected. ``missed``: the change was detected by reading the
    key after a reconnect; changes that were overwritten meanwhile are not reported. Observations of a prefix also get
    ``LOST``, with the prefix as ``key``: the connection was lost, and changes under it may have been missed.
    ``traceparent``: context of the trace of the change, if it has one.
    """

    key: bytes
    operation: str
    value: bytes | None
    version: Hlc | None
    missed: bool = False
    traceparent: str | None = None


class Observation:
    """The changes of a key or prefix, in order; an asynchronous iterator that ends when the client is closed.

    ``entry`` is the key's entry when the observation began, or was restored after a reconnect (None: no such key).
    ``dropped`` counts changes that were dropped because they were not read in time.
    """

    def __init__(self, entry: Entry | None = None) -> None:
        self.entry = entry
        self.dropped = 0
        self._changes: deque[KeyChange] = deque()
        self._closed = False
        self._error: PenstockError | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KeyChange:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._changes.popleft()

    def put(self, change: KeyChange) -> None:
        """Add ``change``; if too many are unread, drop the oldest."""
        if len(self._changes) >= MAX_UNREAD:
            self._changes.popleft()
            self.dropped += 1
        self._changes.append(change)
        self._wake.set()

    def close(self, error: PenstockError | None = None) -> None:
        """End the iteration after the unread changes, with ``error`` if given."""
        self._closed = True
        self._error = error
        self._wake.set()


class SharedKey:
    """An observed key of an MQTT client, for which the store has one observation.

    ``lock`` orders the requests that begin and end it; ``users``: the blocks that use it; ``references``: these, and
    those that are about to end it.
    """

    __slots__ = ("lock", "references", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self.references = 0


class SharedKeys:
    """The observed keys of one MQTT client, which several clients of the state store may use."""

    _all: ClassVar[WeakKeyDictionary[MqttClient, SharedKeys]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._keys: dict[tuple[bytes, bool], SharedKey] = {}

    @classmethod
    def of_client(cls, mqtt: MqttClient) -> SharedKeys:
        """Return the observed keys of ``mqtt``."""
        return cls._all.setdefault(mqtt, cls())

    def acquire(self, key: bytes, *, prefix: bool) -> SharedKey:
        """Add a user of a key."""
        shared = self._keys.setdefault((key, prefix), SharedKey())
        shared.users += 1
        shared.references += 1
        return shared

    def release(self, key: bytes, *, prefix: bool) -> None:
        """Remove a reference to a key."""
        shared = self._keys[key, prefix]
        shared.references -= 1
        if not shared.references:
            del self._keys[key, prefix]


class ObservedKey:
    """An observed key or prefix of a client: its last version, its entry, and its observations.

    ``active``: the store observes it for this client; ``users``: the blocks that use it; ``shared``: the same key of
    all clients with the same MQTT client.
    """

    __slots__ = ("active", "entry", "key", "observations", "prefix", "shared", "users", "version")

    def __init__(self, key: bytes, shared: SharedKey, *, prefix: bool = False) -> None:
        self.key = key
        self.shared = shared
        self.prefix = prefix
        self.active = False
        self.entry: Entry | None = None
        self.version: Hlc | None = None
        self.observations: set[Observation] = set()
        self.users = 0

    def accept(self, change: KeyChange) -> bool:
        """Pass ``change`` to the observations; False if it is not newer than the last one."""
        if change.version is not None:
            if self.version is not None and change.version <= self.version:
                return False
            self.version = change.version
        self.entry = None
        if change.value is not None and change.version is not None:
            self.entry = Entry(change.value, change.version)
        for observation in self.observations:
            observation.put(change)
        return True

    def compare(self, entry: Entry | None) -> None:
        """Report the difference to the result of a GET as a missed change."""
        if entry is not None:
            self.accept(KeyChange(self.key, "SET", entry.value, entry.version, missed=True))
        elif self.entry is not None:
            self.accept(KeyChange(self.key, "DELETE", None, None, missed=True))


class Observations:
    """The observed keys of a client. ``read``: its GET; ``open``: whether requests may be sent.

    ``shared``: the keys that all clients with the same MQTT client observe.
    """

    def __init__(
        self,
        requests: RequestSender,
        read: Callable[[bytes], Awaitable[Entry | None]],
        shared: SharedKeys,
    ) -> None:
        self.open = False
        self._requests = requests
        self._read = read
        self._shared = shared
        self._keys: dict[tuple[bytes, bool], ObservedKey] = {}
        self._prefixes = 0
        """The number of observed prefixes; without any, a notification needs one lookup."""
        self._resumes = True
        """Whether the store may support resuming observations; determined at the first reconnect."""

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes, *, prefix: bool = False) -> AsyncIterator[Observation]:
        """Observe ``key``, or all keys that begin with it, until the end of the block."""
        shared = self._shared.acquire(key, prefix=prefix)
        observed = self._keys.get((key, prefix))
        if observed is None:
            observed = self._keys[key, prefix] = ObservedKey(key, shared, prefix=prefix)
            self._prefixes += prefix
        observed.users += 1
        observation = Observation()
        try:
            async with shared.lock:
                if prefix:
                    # A notification directly after the response is dispatched before this task continues. For a
                    # single key the GET that follows detects such a change.
                    observed.observations.add(observation)
                if not observed.active:
                    await self._begin(observed)
                if not prefix:
                    observation.entry = observed.entry
                    observed.observations.add(observation)
            yield observation
        finally:
            observed.observations.discard(observation)
            observed.users -= 1
            shared.users -= 1
            try:
                if not observed.users:
                    await self._stop(observed)
            finally:
                self._shared.release(key, prefix=prefix)
                if not observed.users and self._keys.get((key, prefix)) is observed:
                    del self._keys[key, prefix]
                    self._prefixes -= prefix

    async def _begin(self, observed: ObservedKey) -> bool:
        """Begin the observation at the store; return whether no change since the last one can have been missed."""
        again = observed.active
        if again and observed.version is not None and await self._resume(observed, observed.version):
            return True
        extension = "prefix-observe" if observed.prefix else None
        payload, version = await self._requests.call(_command(observed), extension=extension)
        if decode_reply(payload).kind not in (ReplyKind.OK, ReplyKind.INTEGER):
            raise RemoteProtocolError(f"state store: answer to KEYNOTIFY was {payload[:100]!r}")
        whole = False
        if not observed.prefix:
            # The current entry is the reference for differences after a reconnect.
            known, entry = observed.version, await self._read(observed.key)
            if entry is not None or observed.version == known:
                observed.compare(entry)
            # Otherwise a change was reported during the GET. The answer that the key is missing has no version; it is
            # the older one, or a deletion that was reported, too.
            whole = entry is not None and entry.version == known
        else:
            if again:
                observed.accept(KeyChange(observed.key, "LOST", None, None, missed=True))
            if version is not None and (observed.version is None or version > observed.version):
                observed.version = version
        observed.active = True
        return whole

    async def _resume(self, observed: ObservedKey, version: Hlc) -> bool:
        """Resume the observation after ``version``, with the missed changes; False if the store cannot."""
        if not self._resumes:
            return False
        try:
            await self._requests.call([*_command(observed), b"AFTER", str(version).encode()])
        except InvalidRequestError:
            self._resumes = False  # a store without the extension
            return False
        except StateStoreError:
            return False  # the history does not reach that version
        return True

    async def _stop(self, observed: ObservedKey) -> None:
        """End the observation at the store if it has no users; a new user waits for the lock and begins again."""
        async with observed.shared.lock:
            if observed.active and not observed.users:
                observed.active = False
                if self.open and not observed.shared.users:
                    with contextlib.suppress(PenstockError):
                        await self._requests.call([*_command(observed), b"STOP"], timeout_s=_STOP_TIMEOUT_S)

    def receive_notification(self, message: Publish) -> None:
        """Pass a notification to the observations of its key."""
        key = key_of_notification(message.topic)
        if key is None:
            return
        single = self._keys.get((key, False))
        targets = [] if single is None else [single]
        if self._prefixes:
            targets += [w for w in self._keys.values() if w.prefix and key.startswith(w.key)]
        if not targets:
            return
        try:
            operation, value = decode_notification(message.payload)
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            return
        version = self._requests.clock.receive(message.properties.user_property("__ts"))
        traceparent = message.properties.user_property("traceparent")
        for observed in targets:
            observed.accept(KeyChange(key, operation, value, version, traceparent=traceparent))

    async def restore(self) -> bool:
        """Begin all observations again after a reconnect, because the store ended them with the connection.

        Returns True if every missed change was reported; False if some may have been overwritten meanwhile.
        """
        todo = deque(self._keys.values())
        whole = True
        while todo:
            observed = todo[0]
            try:
                async with observed.shared.lock:
                    if observed.active:
                        whole &= await self._begin(observed)
                        for observation in observed.observations:
                            observation.entry = observed.entry
            except UnavailableError as error:
                # The next reconnect restarts this method.
                _log.warning("observation not restored yet key=%s: %s", as_text(observed.key), error.what)
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            except PenstockError as error:
                for observation in observed.observations:
                    observation.close(error)
            todo.popleft()
        return whole

    def close(self, error: PenstockError | None) -> None:
        """End all observations, with ``error`` if given."""
        for observed in self._keys.values():
            for observation in observed.observations:
                observation.close(error)


def _command(observed: ObservedKey) -> list[bytes]:
    return [b"KEYNOTIFY", observed.key, b"PREFIX"] if observed.prefix else [b"KEYNOTIFY", observed.key]

"""Retained messages: the last message of each topic, searched by topic filter.

A PUBLISH with RETAIN may be refused by ``connections/publish.py`` and ``routing/router.py``; ``route`` in ``core.py``
stores it here, or deletes the stored message if the payload is empty. SUBSCRIBE (``subscribing.py``) decides whether
retained messages are sent, ``RetainedDelivery`` in ``session.py`` sends them; ``Retained.delivers`` and
``node/security.py`` withhold messages whose publisher lost its rights. A copy in the queue of an offline session
expires in ``Session.send_queued``; ``model/message.py`` decides when a message has expired. Besides clients,
``mqtt/bridge.py`` publishes retained messages of other brokers, ``session_manager.py`` wills, and ``core.py`` messages
of services and of ``$SYS``.

On disk they are changes of the journal (``model/journal.py``), committed by ``mqtt/persistence.py``, written and read
by ``mqtt/storage.py``; ``recovery.py`` restores them. A will that is retained is published at the start after a crash,
so it may replace or restore a message. Tests with restarts: ``tests/engine/mqtt/test_persistent_sessions.py``,
``tests/faults/test_mqtt_power_loss.py``.

Source: MQTT 5.0 section 3.3.1.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.mqtt.engine.model.journal import Journal, Source
from penstock.mqtt.engine.model.message import Message

__all__ = ["Allows", "Retained", "RetainedSearch"]

LEVEL_BYTES: Final = 256
"""Bytes counted for each level of a topic: a deep topic with a short payload takes more memory than its bytes."""

SWEEP_EVERY_MS: Final = 1_000
"""Minimum interval of scans for expired messages, which visit the whole tree."""

_SYS_PREFIX: Final = "$SYS/"
"""Metrics of the broker and states of bridges are not stored: they are obsolete after a restart."""


Allows = Callable[[Source, str, int], bool]
"""Function that returns True if a publisher is still permitted to publish retained messages to a topic at a QoS."""


class _Level:
    __slots__ = ("children", "message", "number", "source")

    def __init__(self) -> None:
        self.children: dict[str, _Level] = {}
        self.message: Message | None = None
        self.source: Source | None = None
        self.number = 0
        """Number of the change that stored the message."""


class Retained:
    """Topic -> message, as a tree of topic levels. Bounded by number and bytes.

    Expired messages are deleted when a search finds them, and all of them when room is needed.
    """

    __slots__ = (
        "_expiry",
        "_root",
        "_stored",
        "_sweep_at",
        "allows",
        "bytes",
        "count",
        "journal",
        "max_bytes",
        "max_messages",
        "withheld",
    )

    def __init__(self, max_messages: int, max_bytes: int, journal: Journal | None = None) -> None:
        self._root = _Level()
        self._expiry = 0
        """Lower bound of the next expiry, an instant in ms; 0: no message expires."""
        self._sweep_at = 0
        self._stored = 0
        """Messages stored so far, replaced and deleted ones included."""
        self.count = 0
        self.bytes = 0
        self.journal = journal
        """Records every change."""
        self.allows: Allows | None = None
        """Checks the publisher's rights at each delivery (compare CVE-2018-12546); None: no access control."""
        self.withheld = 0
        """Number of deliveries skipped because the publisher is no longer permitted to publish."""
        self.max_messages = max_messages
        self.max_bytes = max_bytes

    def store(self, topic: str, message: Message, source: Source | None = None) -> bool:
        """Store ``message`` for ``topic``, or delete the stored one if the payload is empty.

        ``source``: its publisher; None: the node itself, whose messages are always delivered. Returns False without a
        change if a limit is exceeded [MQTT-3.3.1-5 to -7].
        """
        if not message.payload:
            self._delete(topic)
            self._record(topic, message)  # even if none is stored: an earlier deletion may be uncommitted
            return True
        if not self._has_room(topic, message):
            if not self._expiry or message.accepted_at < max(self._expiry + 1, self._sweep_at):
                return False
            self._sweep(message.accepted_at)
            if not self._has_room(topic, message):
                return False
        self.restore(topic, message, source)
        self._record(topic, message, source)
        return True

    def restore(self, topic: str, message: Message, source: Source | None) -> None:
        """Store a message with a payload regardless of the limits, which may have been lowered before this start."""
        count, size = self._totals_with(topic, message)
        if message.expires_at and (not self._expiry or message.expires_at < self._expiry):
            self._expiry = message.expires_at
        level = self._root
        for name in topic.split("/"):
            child = level.children.get(name)
            if child is None:
                child = level.children[name] = _Level()
            level = child
        level.message = message
        level.source = source
        self._stored += 1
        level.number = self._stored
        self.count, self.bytes = count, size

    def get(self, topic: str) -> Message | None:
        """Return the message of ``topic``, or None."""
        level = self._level(topic)
        return None if level is None else level.message

    def delivers(self, topic: str, message: Message) -> bool:
        """Return whether ``message`` is still retained for ``topic`` and its publisher may still publish it."""
        level = self._level(topic)
        if level is None or level.message is not message:
            return False
        source = level.source
        if source is None or self.allows is None or self.allows(source, topic, message.qos):
            return True
        self.withheld += 1
        return False

    def _level(self, topic: str) -> _Level | None:
        level = self._root
        for name in topic.split("/"):
            child = level.children.get(name)
            if child is None:
                return None
            level = child
        return level

    def search(self, topic_filter: str) -> RetainedSearch:
        """Begin a search for the messages that match a topic filter."""
        return RetainedSearch(self, self._root, self._stored, topic_filter)

    def delete_expired(self, message: Message, now: int) -> bool:
        """Delete a stored message if it has expired; return whether it has."""
        if not message.expired(now):
            return False
        self._expire(message.topic)
        return True

    def _record(self, topic: str, message: Message, source: Source | None = None) -> None:
        if self.journal is not None and not topic.startswith(_SYS_PREFIX):
            self.journal.retained(topic, message, source)

    def _has_room(self, topic: str, message: Message) -> bool:
        """Whether ``message`` is within the limits, or takes no more room than the one that it replaces."""
        count, size = self._totals_with(topic, message)
        return (count <= self.max_messages or count == self.count) and (size <= self.max_bytes or size <= self.bytes)

    def _totals_with(self, topic: str, message: Message) -> tuple[int, int]:
        """Return count and bytes after storing ``message``."""
        old = self.get(topic)
        if old is None:
            return self.count + 1, self.bytes + _cost(message)
        return self.count, self.bytes + _cost(message) - _cost(old)

    def _sweep(self, now: int) -> None:
        """Delete expired messages; visits the whole tree, so it does nothing before the next expiry."""
        self._sweep_at = now + SWEEP_EVERY_MS
        expired: list[str] = []
        self._expiry = 0
        pending = [self._root]
        while pending:
            level = pending.pop()
            pending += level.children.values()
            message = level.message
            if message is None or not message.expires_at:
                continue
            if message.expired(now):
                expired.append(message.topic)
            elif not self._expiry or message.expires_at < self._expiry:
                self._expiry = message.expires_at
        for topic in expired:
            self._expire(topic)

    def _expire(self, topic: str) -> None:
        self._delete(topic)
        if self.journal is not None and not topic.startswith(_SYS_PREFIX):
            self.journal.retained_expired(topic)

    def _delete(self, topic: str) -> None:
        levels = topic.split("/")
        path = [self._root]
        for name in levels:
            child = path[-1].children.get(name)
            if child is None:
                return
            path.append(child)
        message = path[-1].message
        if message is None:
            return
        path[-1].message = path[-1].source = None
        self.count -= 1
        self.bytes -= _cost(message)
        for i in range(len(levels) - 1, -1, -1):
            if path[i + 1].children or path[i + 1].message is not None:
                break
            del path[i].children[levels[i]]


class RetainedSearch:
    """A search for the messages that match a topic filter, in steps, because a filter may match all of them.

    Messages below one level are found in the order in which their topics were created. A message that is stored during
    the search is omitted: the subscription received it when it was published.
    """

    __slots__ = ("_last", "_pending", "_retained", "_root", "_wanted")

    def __init__(self, retained: Retained, root: _Level, last: int, topic_filter: str) -> None:
        self._last = last
        self._retained = retained
        self._root = root
        self._wanted = topic_filter.split("/")
        self._pending: list[tuple[list[_Level], int]] = [([root], 0)]
        """Levels to visit, the last one first, each list with the index of its part of the filter."""

    @property
    def done(self) -> bool:
        """Whether all matching messages were found."""
        return not self._pending

    def find(self, limit: int, now: int) -> list[Message]:
        """Visit at most ``limit`` levels of topics and return the messages found there; expired ones are deleted."""
        found: list[Message] = []
        pending, wanted = self._pending, self._wanted
        for _ in range(limit):
            if not pending:
                break
            levels, depth = pending[-1]
            level = levels.pop()
            if not levels:
                pending.pop()
            name = "" if depth == len(wanted) else wanted[depth]
            message = level.message
            if (
                message is not None
                and (depth == len(wanted) or name == "#")
                and level.number <= self._last
                and not self._retained.delete_expired(message, now)
            ):
                found.append(message)
            if depth == len(wanted):
                continue
            if name in {"#", "+"}:
                children = self._children(level)
                if children:
                    pending.append((children, depth if name == "#" else depth + 1))
            else:
                child = level.children.get(name)
                if child is not None:
                    pending.append(([child], depth + 1))
        return found

    def _children(self, level: _Level) -> list[_Level]:
        """Return the levels below ``level`` that a wildcard matches, the first one last."""
        if level is self._root:  # [MQTT-4.7.2-1]
            children = [child for name, child in level.children.items() if name[:1] != "$"]
        else:
            children = list(level.children.values())
        children.reverse()
        return children


def _cost(message: Message) -> int:
    return message.size + LEVEL_BYTES * (message.topic.count("/") + 1)

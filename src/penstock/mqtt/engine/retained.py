"""Retained messages: the last one of each topic, found by topic filter.

Source: MQTT 5.0 section 3.3.1.3.
"""

from __future__ import annotations

from penstock.mqtt.engine.message import Message

__all__ = ["Retained"]


class _Level:
    __slots__ = ("children", "message")

    def __init__(self) -> None:
        self.children: dict[str, _Level] = {}
        self.message: Message | None = None


class Retained:
    """Topic -> message, as a tree of topic levels. Bounded by number and bytes; expired messages go when met."""

    __slots__ = ("_root", "bytes", "count", "max_bytes", "max_messages")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._root = _Level()
        self.count = 0
        self.bytes = 0
        self.max_messages = max_messages
        self.max_bytes = max_bytes

    def store(self, topic: str, message: Message) -> bool:
        """Keep ``message`` as the one of ``topic``, or delete that one when its payload is empty.

        False when there is no room; then nothing changes [MQTT-3.3.1-5 to -7].
        """
        if not message.payload:
            self._delete(topic)
            return True
        old = self.get(topic)
        count = self.count + (old is None)
        size = self.bytes + message.size - (old.size if old is not None else 0)
        if count > self.max_messages or size > self.max_bytes:
            return False
        level = self._root
        for name in topic.split("/"):
            child = level.children.get(name)
            if child is None:
                child = level.children[name] = _Level()
            level = child
        level.message = message
        self.count, self.bytes = count, size
        return True

    def get(self, topic: str) -> Message | None:
        """The message of ``topic``, or None."""
        level = self._root
        for name in topic.split("/"):
            child = level.children.get(name)
            if child is None:
                return None
            level = child
        return level.message

    def match(self, topic_filter: str, now: int) -> list[Message]:
        """The messages whose topics match the filter, by topic; those that expired are deleted on the way."""
        found: list[Message] = []
        wanted = topic_filter.split("/")
        root = self._root
        pending = [(root, 0)]
        while pending:
            level, depth = pending.pop()
            if depth == len(wanted):
                if level.message is not None:
                    found.append(level.message)
                continue
            name = wanted[depth]
            if name == "#":
                if level.message is not None:
                    found.append(level.message)
                pending += (
                    (child, depth) for key, child in level.children.items() if level is not root or key[:1] != "$"
                )
            elif name == "+":
                pending += (
                    (child, depth + 1) for key, child in level.children.items() if level is not root or key[:1] != "$"
                )
            else:
                child_of_name = level.children.get(name)
                if child_of_name is not None:
                    pending.append((child_of_name, depth + 1))
        fresh: list[Message] = []
        for message in found:
            if message.expires_at and message.expires_at <= now:
                self._delete(message.publish.topic)
            else:
                fresh.append(message)
        fresh.sort(key=lambda message: message.topic_wire[2:])
        return fresh

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
        path[-1].message = None
        self.count -= 1
        self.bytes -= message.size
        for i in range(len(levels) - 1, -1, -1):
            if path[i + 1].children or path[i + 1].message is not None:
                break
            del path[i].children[levels[i]]

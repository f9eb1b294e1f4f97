"""Consumers that choose their partitions themselves (methods 20 to 22): the master only says what there is.

Members of a group agree on topics, filters and the number of instances; each has its own instance number. The master
keeps a version of the group's partition metadata, and tells it where a member's is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.origins import Origin

__all__ = ["ClientGroup", "ClientMember"]

META_PUSH_MS = 180_000
"""A member that took metadata so long ago gets it with a heartbeat, if it changed."""


class ClientMember:
    """One consumer: what it said it reads (``partitions``, as it reports them) and which instance it is."""

    __slots__ = ("assigned_at", "id", "last_seen", "node_id", "origin", "partitions", "session_ms")

    def __init__(self, client_id: str, node_id: int, now: int, origin: Origin) -> None:
        self.origin = origin
        self.id = client_id
        self.node_id = node_id
        self.last_seen = now
        self.session_ms = 0  # the desk sets it
        self.assigned_at: int | None = None
        self.partitions: list[str] = []


class ClientGroup:
    """A group whose members balance among themselves. ``source_count`` <= 0: instances have no numbers."""

    def __init__(
        self, name: str, topics: frozenset[str], filters: Mapping[str, frozenset[str]], source_count: int
    ) -> None:
        self.name = name
        self.topics = topics
        self.filters = dict(filters)
        self.source_count = source_count
        self.members: dict[str, ClientMember] = {}
        self.meta: list[str] = []
        self.meta_id = UNDEFINED
        self.from_max_id = UNDEFINED
        """Time (ms) of an administrator's order to go to the newest messages."""

    def refuse(
        self,
        client_id: str,
        topics: frozenset[str],
        filters: Mapping[str, frozenset[str]],
        source_count: int,
        node_id: int,
    ) -> tuple[int, str] | None:
        """Why a member cannot join, as error code and text; the first member decided what all have to say."""
        if topics != self.topics:
            return ErrCode.CLIENT_INCONSISTENT_TOPICSET, f"topics {sorted(topics)}, not {sorted(self.topics)}"
        if dict(filters) != self.filters:
            return ErrCode.CLIENT_INCONSISTENT_FILTERSET, "other filter conditions than the group's first member"
        if source_count > 0 or self.source_count > 0:
            if source_count != self.source_count:
                text = f"{source_count} instances, the group's first member said {self.source_count}"
                return ErrCode.CLIENT_INCONSISTENT_SOURCECOUNT, text
            if any(m.node_id == node_id and m.id != client_id for m in self.members.values()):
                return ErrCode.CLIENT_DUPLICATE_INDEXID, f"instance {node_id} is another member"
        return None

    def join(self, client_id: str, node_id: int, now: int, origin: Origin) -> ClientMember:
        """A member registers, again too."""
        member = self.members[client_id] = ClientMember(client_id, node_id, now, origin)
        return member

    def leave(self, client_id: str) -> bool:
        """Forget a member; whether it was there."""
        return self.members.pop(client_id, None) is not None

    def update_meta(self, meta: Iterable[str], now: int) -> None:
        """Take over the partitions there are; a change gets a new version."""
        fresh = sorted(meta)
        if self.meta_id == UNDEFINED or fresh != self.meta:
            self.meta = fresh
            self.meta_id = max(now, self.meta_id + 1)

    def wants_meta(self, member: ClientMember, meta_id: int, now: int) -> bool:
        """Whether a heartbeat's answer carries the metadata: it changed, and the member settled long ago."""
        if meta_id == self.meta_id or not member.partitions:
            return False
        return member.assigned_at is not None and now - member.assigned_at > META_PUSH_MS

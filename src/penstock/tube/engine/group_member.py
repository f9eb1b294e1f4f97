"""What every member of a group is, however its partitions are chosen: names, filters, what it says to brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import LocalProtocolError
from penstock.tube.codec.proto import broker_pb2, master_pb2, shared_pb2
from penstock.tube.codec.strings import GROUP_RULE, TOPIC_RULE, UNDEFINED, Partition, valid_group, valid_topic
from penstock.tube.engine.credentials import Credentials
from penstock.tube.record import encode_msg_type

__all__ = ["FRESH", "GroupMember"]

REGISTER, UNREGISTER = 31, 32
EXTENSIONS = 2  # version that we know: the broker answers with its own
FRESH = 303
"""qryPriorityId: read also what is not on disk yet. Without it filtered consumers of Apache's brokers see a message
up to 20 seconds late (tubemq.md 10.5)."""


class GroupMember:
    """One member of ``group``. ``filters``: topic -> message types. ``held``: partitions registered at brokers.

    ``session_ms``: how long servers keep its partitions while it is silent; 0: as they do for everybody.
    """

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        *,
        priority: int = FRESH,
        credentials: Credentials | None = None,
        session_ms: int = 0,
    ) -> None:
        names = list(topics)
        if not valid_group(group):
            raise LocalProtocolError(f"tube: {group!r} cannot be a group: {GROUP_RULE}")
        if not names:
            raise LocalProtocolError("tube: a consumer needs a topic", do="name one at least")
        for name in names:
            if not valid_topic(name) and name != "__offset_history__":
                raise LocalProtocolError(f"tube: {name!r} cannot be a topic: {TOPIC_RULE}")
        self.credentials = credentials
        self.session_ms = session_ms
        self.client_id = client_id
        self.group = group
        self.topics = sorted(set(names))
        self.filters = {topic: frozenset(map(encode_msg_type, items)) for topic, items in filters.items() if items}
        self.token = UNDEFINED
        self.held: set[Partition] = set()
        self.host = host
        self.priority = priority
        if not set(self.filters) <= set(self.topics):
            raise LocalProtocolError(
                f"tube: filters for {sorted(set(self.filters) - set(self.topics))}, not subscribed"
            )

    def lost(self, partition: Partition) -> None:
        """The partition is not held any more."""
        self.held.discard(partition)

    def close(self) -> master_pb2.CloseRequestC2M:
        """Goodbye to the master."""
        return master_pb2.CloseRequestC2M(clientId=self.client_id, groupName=self.group, authInfo=self._certificate())

    def partition_heartbeat(self, partitions: Iterable[Partition]) -> broker_pb2.HeartBeatRequestC2B:
        """The heartbeat to the broker of ``partitions``."""
        return broker_pb2.HeartBeatRequestC2B(
            clientId=self.client_id,
            groupName=self.group,
            readStatus=0,
            partitionInfo=[partition.full for partition in sorted(partitions)],
            qryPriorityId=self.priority,
            authInfo=self._authorized(),
        )

    def partition_register(
        self, partition: Partition, read_status: int, *, leave: bool, offset: int | None = None
    ) -> broker_pb2.RegisterRequestC2B:
        """Registers at the partition's broker, or (``leave``) takes the registration back.

        ``offset``: begin there, whatever position the group has.
        """
        return broker_pb2.RegisterRequestC2B(
            opType=UNREGISTER if leave else REGISTER,
            clientId=self.client_id,
            groupName=self.group,
            topicName=partition.topic,
            partitionId=partition.id,
            readStatus=read_status,
            filterCondStr=() if leave else sorted(self.filters.get(partition.topic, ())),
            currOffset=offset,
            qryPriorityId=self.priority,
            authInfo=self._authorized(),
            extensions=None if leave else EXTENSIONS,
            sessionTimeoutMs=None if leave else self.session_ms or None,
        )

    def _authorized(self) -> shared_pb2.AuthorizedInfo:
        info = shared_pb2.AuthorizedInfo(visitAuthorizedToken=self.token)
        if self.credentials is not None:
            info.authAuthorizedToken = self.credentials.broker_token()
        return info

    def _certificate(self) -> shared_pb2.MasterCertificateInfo | None:
        return None if self.credentials is None else self.credentials.certificate()

    def _take_token(self, info: shared_pb2.MasterAuthorizedInfo, *, again: bool = False) -> None:
        if self.credentials is not None:
            self.credentials.take(info, again=again)
        if info.visitAuthorizedToken:
            self.token = info.visitAuthorizedToken

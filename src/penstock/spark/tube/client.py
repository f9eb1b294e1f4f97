"""The tube's readers as the source uses them: one face for our brokers and for Apache's, which have no exact ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.io.credentials import ANYBODY, Login
from penstock.spark.tube.offsets import Partition

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = Sequence[int] | npt.NDArray[np.int64]

__all__ = [
    "DEFAULT_GROUP",
    "DEFAULT_HTTP_PORT",
    "Address",
    "Batch",
    "Client",
    "PartitionInfo",
    "Peer",
    "Reader",
    "TubeClient",
]

DEFAULT_GROUP = "spark-tubemq"
DEFAULT_HTTP_PORT = 8080


class Peer(NamedTuple):
    """Whom to ask and as whom. ``http``: administration of a master; None: port 8080 of the first of ``masters``.

    ``group`` begins the names under which ranges are read where a broker wants a group.
    """

    masters: str
    login: Login = ANYBODY
    http: str | None = None
    group: str = DEFAULT_GROUP
    batch_bytes: int | None = None

    @property
    def administration(self) -> str:
        """Address of the masters' administration."""
        return self.http or f"{self.masters.split(',', 1)[0].rpartition(':')[0]}:{DEFAULT_HTTP_PORT}"


class Address(NamedTuple):
    """Where a broker is. ``http``: its administration, of a broker without ranges; "" for ours, None if not known."""

    host: str
    port: int
    http: str | None = None


class Batch(Protocol):
    """Messages of one partition in order, as columns of equal length.

    A broker without ranges tells no ``append_times`` (they are empty), but message ids; its ``offsets`` say where the
    fetch of each began. Every message before ``reached`` is in this batch or an earlier one. ``spans``: where the
    payloads stand in one piece of memory, if they do; ``payloads`` are then made when somebody asks.
    """

    @property
    def offsets(self) -> Numbers:
        """Offset of each message."""
        ...

    @property
    def append_times(self) -> Numbers:
        """When the broker took each, in milliseconds since 1970."""
        ...

    @property
    def flags(self) -> Numbers:
        """The flag of each: whether its payload begins with attributes."""
        ...

    @property
    def payloads(self) -> Sequence[bytes]:
        """Attributes and body of each, as they were sent."""
        ...

    @property
    def spans(self) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """The piece of memory, and where in it each payload begins and ends."""
        ...

    @property
    def message_ids(self) -> Sequence[int] | None:
        """The broker's id of each, where it has no ranges."""
        ...

    @property
    def reached(self) -> int:
        """Offset up to which the partition was read."""
        ...


class PartitionInfo(Protocol):
    """A partition as a master announces it."""

    @property
    def broker_id(self) -> int:
        """Number of the broker that has it."""
        ...

    @property
    def host(self) -> str:
        """Where that broker is."""
        ...

    @property
    def port(self) -> int:
        """Its port for consumers."""
        ...

    @property
    def partition(self) -> int:
        """Number on the wire: store * 10000 + partition."""
        ...


class Reader(Protocol):
    """A connection to one broker; see :class:`penstock.tube.reader.RangeReader`."""

    @property
    def http(self) -> str:
        """Administration of a broker without ranges; "" of ours."""
        ...

    def bounds(self, topic: str, partition: int) -> tuple[int, ...]:
        """Offsets of the oldest message and behind the newest; further figures as the broker has them."""
        ...

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """Offset of the first message taken at ``time_ms`` or later."""
        ...

    def plan(self, topic: str, partition: int, start: int, end: int, max_messages: int) -> tuple[int, int]:
        """(end, count) of the longest range from ``start``, up to ``end``, with at most ``max_messages`` messages."""
        ...

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        types: Collection[str] = (),
        data_start: int | None = None,
    ) -> Iterator[Batch]:
        """The messages of ``start`` to ``end``, of ``types`` alone where there are any.

        ``data_start``: where the data of the range began when it was planned, at a broker without ranges.
        """
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Client(Protocol):
    """What is needed of :mod:`penstock.tube`."""

    def partitions(self, masters: str, topic: str) -> Sequence[PartitionInfo]:
        """All partitions of ``topic``."""
        ...

    def topics(self) -> Sequence[str]:
        """The names of all topics."""
        ...

    def connect(self, address: Address, partition: Partition) -> Reader:
        """A reader for the broker at ``address``, which holds ``partition``."""
        ...

    def stand_at(self, address: Address, partition: Partition, group: str, position: int) -> None:
        """Put ``group`` at ``position`` of ``partition``."""
        ...


class TubeClient:
    """The real one. What it needs is imported on first use: the data source is importable without it."""

    def __init__(self, peer: Peer, timeout_s: float) -> None:
        self._peer = peer
        self._timeout_s = timeout_s
        self._login = peer.login.client()
        self._webs: dict[int, str] = {}

    def partitions(self, masters: str, topic: str) -> Sequence[PartitionInfo]:
        """All partitions of ``topic``; none if it does not exist.

        Raises:
            UnavailableError: no master answers, or no broker that has the topic is registered at it yet.
        """
        from penstock.tube import reader

        return reader.partitions(masters, topic, timeout_s=self._timeout_s, **self._login)

    def topics(self) -> Sequence[str]:
        """The names of all topics, as the masters' administration tells them; without the system's own."""
        from penstock.tube.client import web

        http = self._peer.administration
        user, password, tls = self._login["user"], self._login["password"], self._login["tls"]
        login = web.WebLogin(user=user, password=password or "", tls=tls)
        rows = web.call(
            http, "admin_query_topic_info", {}, option="tubemq.http", timeout_s=self._timeout_s, login=login
        )
        return sorted(row["topicName"] for row in rows if not row["topicName"].startswith("__"))

    def connect(self, address: Address, partition: Partition) -> Reader:
        """A reader for the broker at ``address``, which holds ``partition``.

        Where ``address`` does not say whether the broker has ranges, it is asked.

        Raises:
            UnavailableError: the broker does not answer, or a master's administration that is needed.
            RefusedError: the broker refuses.
        """
        from penstock.tube import reader
        from penstock.tube.client import registered

        host, port, http = address
        if not http:
            size = {} if self._peer.batch_bytes is None else {"batch_bytes": self._peer.batch_bytes}
            ranges = reader.RangeReader(host, port, timeout_s=self._timeout_s, **size, **self._login)
            if http is not None or _has_ranges(ranges, partition):
                return ranges
            http = self._web_of(partition.broker_id)
        return registered.RegisteredReader(
            host,
            port,
            http=http,
            group=self._peer.group,
            token=self._visit_token,
            timeout_s=self._timeout_s,
            **self._login,
        )

    def stand_at(self, address: Address, partition: Partition, group: str, position: int) -> None:
        """Put ``group`` at ``position`` of ``partition``, for monitoring to see."""
        from penstock.tube.client.registered import Registrar

        host, port, _ = address
        with Registrar(host, port, token=self._visit_token, timeout_s=self._timeout_s, **self._login) as registrar:
            registrar.stand_at(group, partition.topic, partition.partition, position)

    def _visit_token(self) -> int:
        from penstock.tube import reader

        return reader.visit_token(self._peer.masters, timeout_s=self._timeout_s, **self._login)

    def _web_of(self, broker_id: int) -> str:
        from penstock.tube.client.registered import broker_webs

        if broker_id not in self._webs:
            try:
                self._webs = broker_webs(self._peer.administration, timeout_s=self._timeout_s)
            except (UnavailableError, ConfigError) as error:
                raise UnavailableError(
                    f"broker {broker_id} has no exact ranges, and {error.what}",
                    applied=False,
                    why="Apache's brokers do not say on the wire what retention removed; their administration does",
                    do="set tubemq.http to HOST:PORT of the master's administration (webPort in its master.ini)",
                ) from error
        http = self._webs.get(broker_id)
        if http is None:
            raise RefusedError(
                f"the administration at {self._peer.administration} knows no broker {broker_id}, or not its HTTP port",
                do="set tubemq.http to the administration of the masters in tubemq.master",
            )
        return http


def _has_ranges(ranges: Reader, partition: Partition) -> bool:
    from penstock.tube.reader import NO_RANGES

    try:
        ranges.bounds(partition.topic, partition.partition)
    except RefusedError as error:
        ranges.close()
        if error.code == NO_RANGES:
            return False
        raise
    except BaseException:
        ranges.close()
        raise
    return True

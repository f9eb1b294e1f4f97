"""What a master tells whoever only reads or plans: where partitions are, and the token brokers want; blocking."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import UnavailableError
from penstock.tube.addresses import Address, parse_masters
from penstock.tube.client.blocking_link import BlockingLink, accepted, client_id, credentials_of
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import master_pb2
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, DEFAULT_BROKER_TLS_PORT
from penstock.tube.engine.client.routes import Routes

__all__ = ["PartitionInfo", "TopicUnavailableError", "partitions", "visit_token"]


class TopicUnavailableError(UnavailableError):
    """A topic exists, but its partitions are not known: no broker that has it is registered at the master (yet)."""


class PartitionInfo(NamedTuple):
    """A partition of a topic and the broker that has it. ``partition`` is the wire id (10,000 a store)."""

    broker_id: int
    host: str
    port: int
    partition: int


def partitions(
    masters: str | Sequence[Address],
    topic: str,
    *,
    timeout_s: float = 10.0,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> list[PartitionInfo]:
    """All partitions of ``topic`` as the master announces them, by broker and number; empty if there is no such topic.

    Those that take no records at present are among them, but for Apache's master, whose answer is also empty while no
    broker of the topic is registered.

    ``user`` and ``password`` sign where the cluster has users; ``tls``: ``masters`` are TLS addresses, and so are those
    of the brokers in the answer.

    Raises:
        TopicUnavailableError: the topic exists, and no broker that has it is registered at the master (yet).
        UnavailableError: no master answers.
        RefusedError: the master refuses.
    """
    routes = _learn(masters, {topic}, timeout_s, user, password, tls)
    return [PartitionInfo(p.broker.id, p.broker.host, p.broker.port, p.id) for p in routes.partitions(topic)]


def visit_token(
    masters: str | Sequence[Address],
    *,
    timeout_s: float = 10.0,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:
    """The token that brokers of the cluster may want of a consumer; it changes every few minutes.

    Raises:
        UnavailableError: no master answers.
        RefusedError: the master refuses.
    """
    return _learn(masters, set(), timeout_s, user, password, tls).token


def _learn(
    masters: str | Sequence[Address],
    topics: set[str],
    timeout_s: float,
    user: str | None,
    password: str | None,
    tls: ssl.SSLContext | None,
) -> Routes:
    """What the first master that answers tells a producer of ``topics``."""
    routes = Routes(
        client_id("planner"),
        "127.0.0.1",
        credentials=credentials_of(user, password),
        default_port=DEFAULT_BROKER_PORT if tls is None else DEFAULT_BROKER_TLS_PORT,
        reads=True,
    )
    routes.topics |= topics
    last: UnavailableError | None = None
    for host, port in parse_masters(masters):
        try:
            with BlockingLink(host, port, timeout_s, tls) as connection:
                _ask_master(connection, routes)
                return routes
        except TopicUnavailableError:
            raise  # the active master says so
        except UnavailableError as error:
            last = error
    assert last is not None
    raise last


def _ask_master(connection: BlockingLink, routes: Routes) -> None:
    service = Service.MASTER
    registered = connection.call(service, MethodId.PRODUCER_REGISTER, routes.register(), master_pb2.RegisterResponseM2P)
    accepted(registered.errCode, registered.errMsg, connection.peer)
    routes.registered(registered)
    heard = connection.call(service, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat(), master_pb2.HeartResponseM2P)
    if heard.errCode != ErrCode.NOT_READY:
        accepted(heard.errCode, heard.errMsg, connection.peer)
    routes.heard(heard)
    connection.call(service, MethodId.PRODUCER_CLOSE, routes.close(), master_pb2.CloseResponseM2P)
    if heard.errCode == ErrCode.NOT_READY:
        names = ", ".join(map(repr, sorted(routes.topics)))
        raise TopicUnavailableError(
            f"tube: the partitions of topic {names} are not known yet",
            applied=False,
            why="; ".join(routes.unavailable.values()) or heard.errMsg,
            do="wait until its brokers have registered at the master, or start them (penstock tube brokers)",
        )

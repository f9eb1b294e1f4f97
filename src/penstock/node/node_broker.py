"""The TubeMQ broker of a node, from its configuration."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from penstock.node.config.listeners import ListenerSection
from penstock.node.config.node import NodeConfig, TubeBrokerHttpListener
from penstock.node.config.tube import tube_limits
from penstock.runtime.io.network import Address
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.access import ClientAccess

__all__ = ["advertised_address", "node_broker", "reachable", "web_address"]


def node_broker(
    config: NodeConfig,
    masters: Sequence[str] | Callable[[], Sequence[str]],
    *,
    web: Address,
    token: str,
    access: ClientAccess | None,
    user: tuple[str, str],
) -> TubeBroker:
    """Return the broker, not started. ``web``: bound address of its administration; ``user``: name and password with
    which it signs at ``masters``."""
    told = config.tube_broker.advertise
    return TubeBroker(
        config.data_dir.absolute(),
        config.durability,
        config.tube.broker_id,
        masters=masters,
        advertise=None if told is None else str(told),
        web_address=web_address(config.tube_broker_http, web),
        max_store_bytes=config.tube.max_store_bytes,
        session_ms=config.tube.consumer_session_s * 1000,
        topic_durability={
            name: topic.durability for name, topic in config.topics().items() if topic.durability is not None
        },
        staging=config.tube.staging.limits,
        limits=tube_limits(config.tube.limits),
        admin_token=token,
        access=access,
        master_user=user,
    )


def reachable(address: Address) -> Address:
    """Return the address at which this process connects to its own listener."""
    if not address.is_wildcard:
        return address
    return Address("::1" if address.host == "::" else "127.0.0.1", address.port)


def web_address(listener: TubeBrokerHttpListener, bound: Address) -> str:
    """Return the address of the broker's administration that is reported to the master; without a scheme for plain
    HTTP."""
    return ("" if listener.tls is None else "https://") + advertised_address(listener, bound)


def advertised_address(listener: ListenerSection, bound: Address) -> str:
    """Return the advertised address: the configured one, otherwise the bound address, with the host name instead of a
    wildcard."""
    if listener.advertise is not None:
        return str(listener.advertise)
    return str(Address(socket.gethostname(), bound.port) if bound.is_wildcard else bound)

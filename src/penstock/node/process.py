"""A node as a process: signals, systemd, reloads, and the wait of a standby for its election."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import penstock
from penstock import compiled
from penstock.errors import PenstockError
from penstock.node.config.cluster import needs_cluster
from penstock.node.config.listeners import ListenerSection
from penstock.node.config.node import LISTENERS, NodeConfig
from penstock.node.config.profiles import Profile
from penstock.node.extras import check_extras
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.loop import (
    freeze_memory,
    install_signal_handlers,
    loop_name,
    run,
    run_until,
    tune_process,
)
from penstock.runtime.observability import logs
from penstock.runtime.observability.systemd import ServiceNotifier

if TYPE_CHECKING:
    from penstock.node.cluster.membership import ClusterMembership

__all__ = ["run_node", "serve"]

_log = logging.getLogger("penstock.node")


def run_node(
    config: NodeConfig,
    *,
    on_ready: Callable[[ReadyNode], None],
    read_again: Callable[[], NodeConfig] | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT; returns after the shutdown. A second signal stops the process immediately.

    On SIGHUP the configuration is reloaded with ``read_again``.

    Raises:
        PenstockError: the node could not start.
    """
    logs.configure(config.log_level, config.log_format)
    if config.profile is Profile.AIO:
        from penstock.node import aio  # it needs an extra

        aio.prepare(config)
    tune_process()
    run(serve(config, on_ready, read_again))


async def serve(
    config: NodeConfig, on_ready: Callable[[ReadyNode], None], read_again: Callable[[], NodeConfig] | None = None
) -> None:
    """Start a node, report that it is ready, also to systemd, wait for a signal, close it.

    A standby of a cluster reports to systemd that it is ready when it answers clients.
    """
    check_extras(config)
    stop = install_signal_handlers()
    notifier = ServiceNotifier()
    loop = asyncio.get_running_loop()
    membership = None
    if config.cluster is not None:
        membership = _membership(config)
        loop.add_signal_handler(signal.SIGHUP, membership.reload, read_again or (lambda: config))
    try:
        if membership is not None and not await run_until(
            stop, membership.become_active(on_standby=lambda: notifier.ready("standby"))
        ):
            notifier.stopping()
            return
        await _serve(config, on_ready, read_again or (lambda: config), stop, membership, notifier)
    finally:
        if membership is not None:
            await membership.close()
    _log.info("stopped")


def _membership(config: NodeConfig) -> ClusterMembership:
    with needs_cluster():
        from penstock.node.cluster.membership import ClusterMembership
        from penstock.node.cluster.process import restart_process
    return ClusterMembership(config, restart_process)


async def _serve(
    config: NodeConfig,
    on_ready: Callable[[ReadyNode], None],
    read_again: Callable[[], NodeConfig],
    stop: asyncio.Event,
    membership: ClusterMembership | None,
    notifier: ServiceNotifier,
) -> None:

    def reload() -> bool:
        notifier.reloading()
        done = node.reload(read_again)
        if done and membership is not None:
            membership.reloaded(node.security.config)
        notifier.reloaded(done=done)
        return done

    node = Node(config, membership, reload)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    try:
        gc.disable()  # with many new permanent objects, collections double the time of a start
        try:
            ready = await run_until(stop, node.start())
        except PenstockError as error:
            if membership is not None:
                membership.start_failed(error)
            raise
        finally:
            gc.enable()
        if ready is not None:
            if membership is None:
                freeze_memory()
            else:  # the standby did it; a start leaves no garbage, and clients wait
                gc.freeze()
            fields = {
                "version": penstock.__version__,
                "pid": ready.pid,
                "loop": loop_name(),
                "core": compiled.form(),
            }
            _log.info("ready", extra={"fields": fields})
            _warn_of_anonymous(config)
            on_ready(ready)
            notifier.ready(f"mqtt {ready.mqtt}, http {ready.http}")
            await stop.wait()
    finally:
        notifier.stopping()
        if membership is not None:
            membership.closing()
        await node.close()


def _warn_of_anonymous(config: NodeConfig) -> None:
    listeners: dict[str, ListenerSection] = {
        name.replace("-", "_"): getattr(config, name.replace("-", "_")) for name in LISTENERS
    }
    listeners |= {f"mqtt.listeners.{name}": entry for name, entry in config.mqtt.listeners.items()}
    found = {
        name: str(part.bind)
        for name, part in listeners.items()
        if part.anonymous is not None and not part.bind.is_loopback
    }
    if found:
        _log.warning("anonymous clients from other machines are accepted", extra={"fields": found})

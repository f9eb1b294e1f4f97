"""Run a node as a process: logging, loop, signals, exit."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import penstock
from penstock import compiled
from penstock.node.config.listeners import ListenerSection
from penstock.node.config.node import LISTENERS, NodeConfig
from penstock.node.node import Node, Ready
from penstock.runtime.io.loop import freeze_memory, loop_name, run, tune_process
from penstock.runtime.io.signals import install_signal_handlers, run_until
from penstock.runtime.observability import logs

__all__ = ["run_node", "serve"]

_log = logging.getLogger("penstock.node")


def run_node(
    config: NodeConfig,
    *,
    on_ready: Callable[[Ready], None],
    read_again: Callable[[], NodeConfig] | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT; returns after the shutdown. A second signal stops the process immediately.

    On SIGHUP the configuration is reloaded with ``read_again``.

    Raises:
        PenstockError: the node could not start.
    """
    logs.configure(config.log_level, config.log_format)
    tune_process()
    run(serve(config, on_ready, read_again))


async def serve(
    config: NodeConfig, on_ready: Callable[[Ready], None], read_again: Callable[[], NodeConfig] | None = None
) -> None:
    """Start a node, report that it is ready, wait for a signal, close it."""
    stop = install_signal_handlers()
    node = Node(config)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, node.reload, read_again or (lambda: config))
    try:
        ready = await run_until(stop, node.start())
        if ready is not None:
            freeze_memory()
            fields = {
                "version": penstock.__version__,
                "pid": ready.pid,
                "loop": loop_name(),
                "core": compiled.form(),
            }
            _log.info("ready", extra={"fields": fields})
            _warn_of_anonymous(config)
            on_ready(ready)
            await stop.wait()
    finally:
        await node.close()
    _log.info("stopped")


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

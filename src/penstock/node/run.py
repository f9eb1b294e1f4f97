"""Run a node as a process: logging, loop, signals, exit."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import penstock
from penstock.node.config import NodeConfig
from penstock.node.listening import Listener
from penstock.node.node import Node, Ready
from penstock.node.stopping import told_to_end, unless
from penstock.runtime import logs
from penstock.runtime.loop import freeze_memory, loop_name, run, tune_process

__all__ = ["run_node", "serve"]

_log = logging.getLogger("penstock.node")


def run_node(
    config: NodeConfig,
    *,
    on_ready: Callable[[Ready], None],
    read_again: Callable[[], NodeConfig] | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT; returns once it has drained. A second signal ends the process at once.

    On SIGHUP the configuration is read again, as ``read_again`` gives it, with the files that it names.

    Raises:
        PenstockError: it could not start.
    """
    logs.configure(config.log_level, config.log_format)
    tune_process()
    run(serve(config, on_ready, read_again))


async def serve(
    config: NodeConfig, on_ready: Callable[[Ready], None], read_again: Callable[[], NodeConfig] | None = None
) -> None:
    """Start a node, say so, wait for a signal, close it."""
    stop = told_to_end()
    node = Node(config)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, node.reload, read_again or (lambda: config))
    try:
        ready = await unless(stop, node.start())
        if ready is not None:
            freeze_memory()
            fields = {"version": penstock.__version__, "pid": ready.pid, "loop": loop_name()}
            _log.info("ready", extra={"fields": fields})
            _warn_of_others(config, node.open_to_all)
            on_ready(ready)
            await stop.wait()
    finally:
        await node.close()
    _log.info("stopped")


def _warn_of_others(config: NodeConfig, open_to_all: frozenset[str]) -> None:
    listeners: dict[str, Listener] = {
        **{name: part for name, part in {"mqtt": config.mqtt, **config.mqtt.listeners}.items() if name in open_to_all},
        "tube_broker_http": config.tube_broker_http,
        "http": config.http,
    }
    if config.tube.access is None:
        listeners |= {"tube_master": config.tube_master, "tube_broker": config.tube_broker}
    open_to_others = {name: str(part.bind) for name, part in listeners.items() if not part.bind.is_loopback}
    if open_to_others:
        _log.warning(
            "other machines may reach this: nobody is asked who they are there",
            extra={"fields": open_to_others},
        )

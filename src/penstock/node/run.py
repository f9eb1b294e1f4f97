"""Run a node as a process: logging, loop, signals, exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import penstock
from penstock.node.config import NodeConfig
from penstock.node.node import Node, Ready
from penstock.runtime import logs
from penstock.runtime.loop import freeze_memory, loop_name, run, tune_process

__all__ = ["run_node", "serve"]

_log = logging.getLogger("penstock.node")

FORCED = 1
"""Exit status of a node that was told twice."""


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
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, number, stop)
    node = Node(config)
    loop.add_signal_handler(signal.SIGHUP, node.reload, read_again or (lambda: config))
    try:
        starting = asyncio.create_task(node.start(), name="start")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready = starting.result()
            freeze_memory()
            fields = {"version": penstock.__version__, "pid": ready.pid, "loop": loop_name()}
            _log.info("ready", extra={"fields": fields})
            _warn_of_others(config, node.open_to_all)
            on_ready(ready)
            await stopping
        else:
            # Told to end while it recovers: what was started is closed below.
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
        stopping.cancel()
    finally:
        await node.close()
    _log.info("stopped")


def _warn_of_others(config: NodeConfig, open_to_all: frozenset[str]) -> None:
    listeners = {
        **{name: part for name, part in {"mqtt": config.mqtt, **config.mqtt.listeners}.items() if name in open_to_all},
        "tube_master": config.tube_master,
        "tube_broker": config.tube_broker,
        "tube_broker_http": config.tube_broker_http,
        "http": config.http,
    }
    open_to_others = {name: str(part.bind) for name, part in listeners.items() if not part.bind.is_loopback}
    if open_to_others:
        _log.warning(
            "other machines may reach this and read and write everything: nobody is asked who they are there",
            extra={"fields": open_to_others},
        )


def _stop(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        _log.warning("told to end again, ending at once", extra={"fields": {"signal": name}})
        os._exit(FORCED)
    _log.info("draining", extra={"fields": {"signal": name}})
    stop.set()

"""Latency of a client of a node while a rule of that node sends a backlog to a TubeMQ cluster.

The cluster, a second node, is paused while publishers send messages, which wait in the rule, and continues when all of
them have arrived. Every message is of QoS 1; its PUBACK follows the acknowledgement of the cluster.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from typing import Final

from benchmarks import servers
from benchmarks.figures import Figure, Settings
from benchmarks.isolation import LATE_S, Peer, latencies
from penstock.mqtt.codec.packets import Publish

__all__ = ["catch_up"]

PUBLISHERS: Final = 40
MESSAGES: Final = 1000
"""Messages of each publisher, less than the Receive Maximum of the node."""
PAYLOAD: Final = b"x" * 256
INTERVAL_S: Final = 0.005
"""Interval of the measured client's messages."""
PUBACK_BYTES: Final = 4
CASES: Final = ("no backlog", f"backlog of {PUBLISHERS * MESSAGES:,} messages")


def catch_up(settings: Settings) -> list[Figure]:
    """The p50 and p99 of the measured client, a new pair of nodes for each run."""
    units = {"p50 ms": 0.5, "p99 ms": 0.99}
    figures = {(case, unit): Figure(case, "penstock", unit) for case in CASES for unit in units}
    rates = Figure(CASES[1], "penstock", "messages/s")
    for _ in range(settings.repeats):
        with servers.penstock("memory", ["backlog"]) as cluster:
            rule = {"filter": "line/#", "to": {"tube": {"masters": [cluster["tube_master"]], "topic": "backlog"}}}
            with servers.penstock("memory", rules=[rule]) as node:
                found = {CASES[0]: latencies(node["mqtt"], settings.seconds, INTERVAL_S)}
                found[CASES[1]], per_s = _while_catching_up(node, int(cluster["pid"]))
        rates.runs.append(per_s)
        for case, times in found.items():
            for unit, share in units.items():
                figures[case, unit].runs.append(times[int(len(times) * share)])
    return [*figures.values(), rates]


def _while_catching_up(node: dict[str, str], cluster: int) -> tuple[list[float], float]:
    """Return the latencies in ms while the rule sends its backlog, sorted, and its messages per second."""
    publishers = [Peer(node["mqtt"], f"publisher-{n}") for n in range(PUBLISHERS)]
    os.kill(cluster, signal.SIGSTOP)
    try:
        for n, publisher in enumerate(publishers):
            publisher.send(*(Publish(f"line/{n}", PAYLOAD, 1, packet_id=number + 1) for number in range(MESSAGES)))
        until = time.monotonic() + LATE_S
        while _pending(node["http"]) < PUBLISHERS * MESSAGES:
            if time.monotonic() > until:
                raise SystemExit("the rule did not receive all messages")
            time.sleep(0.05)
    finally:
        os.kill(cluster, signal.SIGCONT)
    began = time.monotonic()
    acknowledged = threading.Thread(target=_read_acknowledgements, args=(publishers,))
    acknowledged.start()
    times = latencies(node["mqtt"], LATE_S * 10, INTERVAL_S, running=acknowledged.is_alive)
    acknowledged.join()
    return times, PUBLISHERS * MESSAGES / (time.monotonic() - began)


def _read_acknowledgements(publishers: list[Peer]) -> None:
    for publisher in publishers:
        left = PUBACK_BYTES * MESSAGES
        while left:
            left -= len(publisher.socket.recv(left))
        publisher.socket.close()


def _pending(address: str) -> int:
    """Return the number of messages that wait for the cluster."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LATE_S) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith("penstock_rule_pending_messages{"))
    return int(float(value))

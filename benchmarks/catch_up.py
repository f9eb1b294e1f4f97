"""Latency of a client of a node while a rule of that node sends a backlog to a TubeMQ cluster, or to Kafka.

The cluster, a second node or a Kafka broker, is paused while publishers send messages, which wait in the rule, and
continues when all of them have arrived. Every message is of QoS 1; its PUBACK follows the acknowledgement of the
cluster. Each run has a new node, and both rules in turn.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

from benchmarks import servers
from benchmarks.figures import Figure, Settings
from benchmarks.isolation import LATE_S, Peer, latencies
from benchmarks.kafka_peer.broker import kafka_process, prepare
from penstock.errors import PenstockError
from penstock.mqtt.codec.packets import Publish

__all__ = ["catch_up"]

PUBLISHERS: Final = 40
MESSAGES: Final = 1000
"""Messages of each publisher, less than the Receive Maximum of the node."""
PAYLOAD: Final = b"x" * 256
INTERVAL_S: Final = 0.005
"""Interval of the measured client's messages."""
PUBACK_BYTES: Final = 4
NO_BACKLOG: Final = "no backlog"
BACKLOG: Final = f"backlog of {PUBLISHERS * MESSAGES:,} messages"
UNITS: Final = {"p50 ms": 0.5, "p99 ms": 0.99}


def catch_up(settings: Settings) -> list[Figure]:
    """The p50 and p99 of the measured client, with a rule to TubeMQ and, if Kafka can be started, one to Kafka."""
    measured = [_Target("TubeMQ")]
    with ExitStack() as stack:
        try:
            address, pid = stack.enter_context(kafka_process(prepare()))
        except PenstockError as reason:
            print(f"catch-up: a rule to Kafka is not measured: {reason.what}", file=sys.stderr)
        else:
            measured.append(_Target("Kafka"))
        for _ in range(settings.repeats):
            for target in measured:
                if target.name == "Kafka":
                    target.run(settings, {"kafka": {"bootstrap": [address], "topic": "backlog"}}, pid)
                    continue
                with servers.penstock("memory", ["backlog"]) as cluster:
                    to = {"tube": {"masters": [cluster["tube_master"]], "topic": "backlog"}}
                    target.run(settings, to, int(cluster["pid"]))
    return [figure for target in measured for figure in target.figures.values()]


class _Target:
    """Runs with rules to the same system."""

    def __init__(self, name: str) -> None:
        self.name = name
        cases = [(case, unit) for case in (NO_BACKLOG, BACKLOG) for unit in UNITS]
        cases.append((BACKLOG, "messages/s"))
        self.figures = {(case, unit): Figure(f"{case}, rule to {name}", "penstock", unit) for case, unit in cases}

    def run(self, settings: Settings, to: Mapping[str, object], cluster: int) -> None:
        """Measure a new node with a rule ``to`` a cluster, the process ``cluster``."""
        with servers.penstock("memory", rules=[{"filter": "line/#", "to": to}]) as node:
            found = {NO_BACKLOG: latencies(node["mqtt"], settings.seconds, INTERVAL_S)}
            found[BACKLOG], per_s = _while_catching_up(node, cluster)
        self.figures[BACKLOG, "messages/s"].runs.append(per_s)
        for case, times in found.items():
            for unit, share in UNITS.items():
                self.figures[case, unit].runs.append(times[int(len(times) * share)])


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

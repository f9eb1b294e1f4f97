"""Many clients, keys and topics: latency among them, what stays after they have left, and how fast all come back.

The same loads are the benchmark cases ``scale`` and ``memory``, beside Mosquitto.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from benchmarks import generator, servers
from benchmarks.connections import connections_possible
from benchmarks.scale import BUSY, IDLE, RELEASED_S, USER, client_tls, memory_node, node, reconnect, steady
from tests.ports import free_port
from tests.tools import skip_or_fail


def test_connections_and_topics_leave_nothing_behind() -> None:
    with memory_node() as server:
        first, second = (
            steady(server, idle=200, busy=20, topics=500, keys=0, seconds=0.5, settle_s=0.5) for _ in range(2)
        )
    assert first.during.descriptors == first.before.descriptors + 220
    for found in (first.after, second.after):
        assert found.descriptors == first.before.descriptors
        assert found.threads == first.before.threads
    assert second.after.memory - first.after.memory < 2e6


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ten_thousand_connections_a_million_keys_and_ten_thousand_topics() -> None:
    if shutil.which("cargo") is None:
        skip_or_fail(f"no load generator: {generator.missing()}")
    idle = connections_possible(BUSY + IDLE) - BUSY
    work = partial(steady, idle=idle, busy=BUSY, topics=10_000, keys=1_000_000, seconds=10.0, settle_s=RELEASED_S)
    with memory_node() as server:
        rounds = [work(server) for _ in range(3)]
    base = rounds[0].before
    for found in rounds:
        assert found.after.descriptors == base.descriptors
        assert found.after.threads == base.threads
    # What the page "Size a node" promises.
    loaded = max(found.during.memory for found in rounds) - base.memory
    for found in rounds:
        assert found.after.memory - base.memory < 0.25 * loaded
    assert rounds[2].during.memory < 1.1 * rounds[0].during.memory


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["anonymous", "certificate", "SCRAM"])
def test_ten_thousand_clients_are_back_after_a_restart(case: str, tmp_path: Path) -> None:
    count = connections_possible(BUSY + IDLE)
    made = servers.certificates(str(tmp_path))
    start = partial(node, str(tmp_path), free_port(), case, made)
    tls = client_tls(made) if case == "certificate" else None
    found = reconnect(start, count, tls=tls, user=USER if case == "SCRAM" else None)
    assert found.present == count
    # Its clients, and whatever else the machine does, take time of the same processors: the benchmark measures it.
    assert found.processor_s < 20

"""Packet identifiers are free, not zero, and go round; messages in flight stay in the order of sending."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.engine.model.inflight import Inflight, InflightEntry


def test_identifiers() -> None:
    inflight = Inflight()
    first = inflight.free_id()
    inflight.add(first, InflightEntry())
    assert (first, inflight.free_id()) == (1, 2)
    inflight._last = 65_534
    assert [inflight.free_id() for _ in range(3)] == [65_535, 2, 3], "1 is taken, 0 does not exist"


def test_identifiers_continue_after_those_of_an_earlier_process() -> None:
    inflight = Inflight()
    for packet_id in (65_534, 65_535, 1):
        inflight.restore(packet_id, InflightEntry())
    assert inflight.free_id() == 2
    assert [entry.packet_id for entry in inflight.values()] == [65_534, 65_535, 1]


def test_an_identifier_that_goes_round_skips_those_in_flight() -> None:
    inflight = Inflight()
    inflight.restore(1, InflightEntry())
    inflight.restore(65_535, InflightEntry())
    assert inflight.assign(InflightEntry()) == 2


def test_an_entry_that_is_put_back_has_its_place_in_the_order() -> None:
    inflight = Inflight()
    entries = [InflightEntry() for _ in range(3)]
    identifiers = [inflight.assign(entry) for entry in entries]
    taken = inflight.pop(identifiers[1])
    assert taken is entries[1]
    inflight.put_back(taken)
    assert inflight.values() == entries
    assert inflight.get(identifiers[1]) is taken


@given(
    st.lists(
        st.tuples(st.sampled_from(["assign", "send", "restore", "acknowledge", "remove", "clear"]), st.integers(1, 300))
    )
)
def test_like_a_dictionary(steps: list[tuple[str, int]]) -> None:
    """Also where identifiers share a slot."""
    inflight = Inflight()
    model: dict[int, InflightEntry] = {}
    for action, n in steps:
        packet_id = n * 64 + n % 7
        if action == "assign":
            entry = InflightEntry()
            packet_id = inflight.assign(entry)
            assert packet_id not in model
            model[packet_id] = entry
        elif action == "send":
            packet_id = inflight.free_id()
            assert packet_id not in model
            model[packet_id] = InflightEntry()
            inflight.add(packet_id, model[packet_id])
        elif action == "restore" and packet_id not in model:
            model[packet_id] = InflightEntry()
            inflight.restore(packet_id, model[packet_id])
        elif action == "acknowledge" and model:
            packet_id = list(model)[n % len(model)]
            assert inflight.pop(packet_id) is model.pop(packet_id)
            assert inflight.pop(packet_id) is None
        elif action == "remove" and model:
            packet_id = list(model)[n % len(model)]
            removed = inflight.get(packet_id)
            assert removed is model.pop(packet_id)
            inflight.remove(removed)
        elif action == "clear" and n % 10 == 0:
            inflight.clear()
            model.clear()
        assert len(inflight) == len(model)
        assert [(entry.packet_id, entry) for entry in inflight.values()] == list(model.items())
        assert inflight.get(packet_id) is model.get(packet_id)


CHAIN = """
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.model.inflight import Inflight
from penstock.mqtt.engine.model.message import Delivery, message_of

message = message_of(Publish("t", b"x"), 0)
inflight = Inflight()
for packet_id in range(64, 65_536, 64):  # each in the slot of the first one, until the table grows
    inflight.restore(packet_id, Delivery(message, 1, 0, b"", "", 0))
for packet_id in range(64, 65_536, 64):
    if packet_id % 1024:
        assert inflight.pop(packet_id) is not None
inflight.clear()
"""
POOL = """
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.model.message import DeliveryPool, message_of

message, pool = message_of(Publish("t", b"x"), 0), DeliveryPool()
deliveries = [pool.create(message, 1, 0, b"", "") for _ in range(5_000)]
for delivery in deliveries:
    pool.recycle(delivery)
del delivery, deliveries, pool
"""


@pytest.mark.parametrize("program", [CHAIN, POOL], ids=["one slot", "spare deliveries"])
def test_freeing_many_entries_leaves_other_memory_alone(program: str) -> None:
    """Entries have no header of the garbage collector, which freeing a chain of more than 50 would write into."""
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

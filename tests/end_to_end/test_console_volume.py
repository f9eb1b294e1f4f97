"""The console of a node with 10,000 sessions, 1,000 topics and a million keys: lists, the API and Chromium."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.mqtt.client import MqttClient
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient, Write
from tests.end_to_end.console_browser import browsing, console_node
from tests.unit.node.test_api import Api

SESSIONS, TOPICS, KEYS = 10_000, 1_000, 1_000_000
BATCH = 10_000
LISTS = {"clients": SESSIONS, "subscriptions": TOPICS, "retained": TOPICS, "topics": TOPICS + 1, "keys": KEYS}
"""Lists, with the number of their rows."""
MAX_ANSWER_BYTES = 1 << 20
"""Size of an answer with 1,000 rows."""
MAX_ANSWER_S = 2.0
"""Processor time of an answer, with everything else that the node does meanwhile."""
MAX_ELEMENTS = 5_000
"""Elements of a page: 50 rows, and the frame."""


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    store = {"max_keys": 2 * KEYS, "principal_share": 100, "extensions": ["batch"]}
    tube = {"topics": {f"topic_{number:04}": {"partitions": 1} for number in range(TOPICS)}}
    async for found in console_node(tmp_path, statestore=store, tube=tube):
        yield found


async def each(count: int, at_a_time: int, work: Callable[[int], Coroutine[Any, Any, object]]) -> None:
    """Do ``work`` for the numbers below ``count``."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_a_time):
            tasks.create_task(some())


async def fill(ready: ReadyNode) -> None:
    host, port = parse_address(ready.mqtt)

    async def session(number: int) -> None:
        async with MqttClient(host, port, client_id=f"meter/{number:05}", session_expiry_s=3600) as client:
            if number < TOPICS:
                await client.subscribe(f"line/{number:04}")

    async def retain(number: int) -> None:
        await publisher.publish(f"line/{number:04}", b'{"bar": 4.5}', retain=True)

    await each(SESSIONS, 50, session)
    async with MqttClient(host, port, client_id="publisher") as publisher:
        await each(TOPICS, 50, retain)
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        for first in range(0, KEYS, BATCH):
            batch = [Write.set(b"line/%07d" % number, b"%d" % number) for number in range(first, first + BATCH)]
            assert all(await store.write_many(batch))


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_pages_stay_small_and_say_what_they_leave_out(node: Node) -> None:
    from playwright.async_api import expect

    ready = await node.start()
    await fill(ready)
    api = Api(ready)
    for name, rows in LISTS.items():
        for query in ("limit=1000", "limit=1000&q=9", "limit=50&q=none-has-this"):
            began_s = time.process_time()
            status, _, found = await api.send(f"/{name}?{query}")
            used_s = time.process_time() - began_s
            size = len(repr(found))
            assert status == 200, found
            assert used_s < MAX_ANSWER_S, (name, query, used_s)
            assert size < MAX_ANSWER_BYTES, (name, query, size)
            assert found["total"] >= rows, (name, found["total"])
            # A list that is not complete has a cursor, or says that it has more. Keys that match are not counted.
            matched = found["matched"]
            if matched is None:
                matched = None if "q=" in query else found["total"]
            is_full = query.startswith(f"limit={len(found['rows'])}&")
            if is_full if matched is None else len(found["rows"]) < matched:
                assert found["next"] or found["complete"] is False, (name, query)
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await browser.sign_in()
        await expect(page.locator("tbody tr")).to_have_count(50)
        browser.allowed = ()
        for name in (*LISTS, "tree", "groups", "events", "records/topic_0000", "audit", ""):
            await browser.open(name)
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            await expect(page.locator("[aria-busy=true]")).to_have_count(0)
            await expect(page.get_by_text("Loading…")).to_have_count(0)
            if name in LISTS:
                await expect(page.locator("tbody tr")).to_have_count(50)
                await expect(page.get_by_role("status")).to_contain_text("rows, 50 on this page")
                await page.get_by_role("link", name="Next page").click()
                await expect(page.get_by_role("link", name="First page")).to_be_visible()
                await expect(page.locator("tbody tr")).to_have_count(50)
            elements = await page.evaluate("document.querySelectorAll('*').length")
            assert elements < MAX_ELEMENTS, (name, elements)
            await browser.look(f"volume-{name or 'overview'}")
        await browser.open("keys?prefix=line%2F09999")
        await expect(page.locator("tbody tr").first).to_contain_text("line/0999900")
        await expect(page.get_by_role("status")).to_contain_text("those that match are not counted")
        await browser.open("keys?q=none-has-this")
        await expect(page.get_by_role("status")).to_contain_text("0 on this page")

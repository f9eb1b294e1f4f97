"""The message browser in Chromium: filters, pages, one record, following, export, and the keyboard."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.node.node import Node, ReadyNode
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.end_to_end.console_browser import LOOKS, ONE_LOOK, browsing, console_node

node = pytest.fixture(console_node)


async def produce(master: str, numbers: range) -> None:
    async with Producer(master) as producer:
        for number in numbers:
            state = "fault" if number % 20 == 7 else "running"
            value = {"machine": f"press-{number % 4}", "state": state, "bar": round(4 + number % 17 / 10, 1)}
            await producer.send(
                "water",
                Record(
                    json.dumps(value).encode() if number % 30 else bytes(range(200, 250)),
                    key=b"press-%d" % (number % 4),
                    headers=[("shift", "early" if number % 2 else "late")],
                    topic=f"plant/press-{number % 4}/state",
                    id=f"m{number}",
                ),
            )


@pytest.mark.parametrize("look", ONE_LOOK)
async def test_records_are_filtered_paged_opened_and_exported(node: Node, look: str) -> None:
    from playwright.async_api import expect

    ready = await node.start()
    await produce(ready.tube_master, range(200))
    width, scheme = LOOKS[look]
    async with browsing(ready, width, scheme) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await browser.sign_in()
        await browser.open("topics/water")
        await page.get_by_role("link", name="Browse records").click()
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(50)
        await expect(rows.first).to_contain_text("press-3")
        await browser.look(f"{look}-records")
        await page.get_by_role("link", name="Older records").click()
        await expect(page.get_by_role("link", name="First page")).to_be_visible()
        await expect(rows).to_have_count(50)
        await page.go_back()
        await expect(page.get_by_role("link", name="First page")).to_have_count(0)
        await page.get_by_label("JSON path").fill('state = "fault"')
        await page.get_by_label("Header or attribute").fill("shift=early")
        await page.get_by_role("button", name="Show").click()
        await expect(rows).to_have_count(10)
        await expect(page.get_by_role("status")).to_contain_text("10 records of 200 examined")
        await browser.look(f"{look}-records-filtered")
        await page.reload()  # the filter is in the address
        await expect(rows).to_have_count(10)
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Export NDJSON").click()
        path = await (await saved.value).path()
        exported = [json.loads(line) for line in (await asyncio.to_thread(Path(path).read_text)).splitlines()]
        assert len(exported) == 10
        assert {json.loads(row["value"])["state"] for row in exported} == {"fault"}
        await page.evaluate("document.activeElement.blur()")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.locator("pre")).to_contain_text('"state": "fault",\n  "bar": 4.0\n}')
        await expect(page.get_by_text("shift", exact=True)).to_be_visible()
        await browser.look(f"{look}-record")
        await page.get_by_role("button", name="As it was sent").click()
        await expect(page.locator("pre")).to_contain_text(json.dumps({"state": "fault"})[1:-1])
        await page.get_by_role("link", name="Records from here").click()
        await expect(page.get_by_label("Begin at")).to_have_value("offset")
        await expect(rows.first).to_contain_text("fault")
        await page.get_by_label("JSON path").fill("state =")
        await page.get_by_label("JSON path").fill("[")
        browser.allowed = ("400 (Bad Request)",)
        await page.get_by_role("button", name="Show").click()
        await expect(page.get_by_role("alert")).to_contain_text("is not a path in JSON with a comparison")
        await browser.open("records/water?key=press-0&q=nothing")
        await expect(page.get_by_role("status")).to_contain_text("0 records of 200 examined")
        await browser.open(f"records/water?partition=0&q={'%C8'}")
        await expect(page.get_by_role("status")).to_be_visible()


async def test_new_records_are_followed_paused_and_continued(node: Node) -> None:
    from playwright.async_api import expect

    ready = await node.start()
    await produce(ready.tube_master, range(20))
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("records/water?follow=1&attribute=shift%3Dlate")
        await browser.sign_in()
        status = page.get_by_role("status")
        await expect(status).to_contain_text("Following: 0 records of 0 examined")
        await produce(ready.tube_master, range(20, 30))
        await expect(status).to_contain_text("Following: 5 records of 10 examined")
        await page.get_by_role("button", name="Pause").click()
        await produce(ready.tube_master, range(30, 40))
        await expect(status).to_contain_text("Paused: 5 records")
        await browser.look("records-paused")
        await page.get_by_role("button", name="Continue").click()
        await expect(status).to_contain_text("Following: 10 records of 20 examined")  # none is missing
        await expect(page.locator("tbody tr")).to_have_count(10)
        await page.get_by_label("Begin at").select_option("time")
        await page.get_by_label("Local time").fill("2020-01-01T00:00:00")
        await page.get_by_role("button", name="Show").click()
        await expect(page.get_by_role("status")).to_contain_text("20 records of 40 examined")


async def test_binary_values_are_shown_as_hexadecimal_or_with_their_schema(tmp_path: Path) -> None:
    (tmp_path / "reading.avsc").write_text(
        '{"type": "record", "name": "Reading", "fields": [{"name": "bar", "type": "double"}]}'
    )
    schema = {"filter": "press/#", "format": "avro", "schema_file": str(tmp_path / "reading.avsc")}
    async for node in console_node(tmp_path / "data", console={"payloads": [schema]}):
        ready = await node.start()
        await produce(ready.tube_master, range(1))
        async with Producer(ready.tube_master) as producer:
            await producer.send("water", Record(struct.pack("<d", 4.5), topic="press/1"))
            await producer.send("water", Record(b"other", topic="press/1"))
        await _read_values(ready)


async def _read_values(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async with browsing(ready) as browser:
        page: Any = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("records/water")
        await browser.sign_in()
        await page.locator("tbody a").last.click()
        await expect(page.locator("pre")).to_contain_text("00000000  c8 c9 ca cb")
        await expect(page.get_by_role("heading", name="Value (hexadecimal: it is not text)")).to_be_visible()
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Save").click()
        path = await (await saved.value).path()
        assert await asyncio.to_thread(Path(path).read_bytes) == bytes(range(200, 250))
        await browser.open("records/water?json=bar%20%3E%204")
        await expect(page.get_by_role("status")).to_contain_text("1 record of 3 examined")
        await page.locator("tbody a").first.click()
        await expect(page.get_by_role("heading", name="Value (Avro, decoded with its schema)")).to_be_visible()
        await expect(page.locator("pre")).to_have_text('{\n  "bar": 4.5\n}')
        await browser.look("record-avro")
        await page.get_by_role("button", name="Hexadecimal").click()
        await expect(page.locator("pre")).to_contain_text("00000000  00 00 00 00 00 00 12 40")
        await browser.open("records/water?q=other")
        await page.locator("tbody a").first.click()
        await expect(page.get_by_text("the payload is not Avro of this schema")).to_be_visible()
        await browser.look("record-avro-problem")

"""The web console in Chromium: every page, light, dark and narrow; sign-in, filters, keyboard, and a change.

With ``PENSTOCK_SCREENSHOTS=DIR`` the pages are saved there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.console.cluster import cluster_reasons
from penstock.console.snapshots import ClusterMember, ClusterSnapshot, EtcdSnapshot
from penstock.errors import StorageError
from penstock.mqtt.client import MqttClient
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from tests.end_to_end.console_browser import LOOKS, browsing, console_node, filled
from tests.unit.node.test_api import Api

node = pytest.fixture(console_node)
PAGES = (
    "clients",
    "subscriptions",
    "messages",
    "tree",
    "tree/plant%2Fb",
    "retained",
    "retained/plant%2Fb",
    "topics",
    "brokers",
    "groups",
    "keys",
    "events",
    "pipelines",
    "pipelines/bottling",
    "pipelines/packing",
    "clients/meter%2F1",
    "topics/water",
    "records/water",
    "records/water/0/0",
    "groups/lake",
    "keys/plant%2Fa",
    "watch?key=plant/a",
    "audit",
)


@pytest.mark.parametrize("look", ["light", pytest.param("dark", marks=pytest.mark.nightly), "narrow"])
async def test_every_page_in_every_look(node: Node, look: str) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    width, scheme = LOOKS[look]
    async with browsing(ready, width, scheme) as browser:
        page = browser.page
        await browser.open()
        await expect(page.get_by_role("heading", name="Ready")).to_be_visible()
        groups = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Consumer groups"))
        await expect(groups).to_contain_text("waiting")
        pipelines = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Pipelines"))
        await expect(pipelines).to_contain_text("2\u202f300 waiting, 8 s behind")
        await expect(pipelines).to_contain_text("→ Tables, State store")
        tables = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Tables"))
        for text in ("124 rows/s", "155 waiting, 900 ms behind", "3 errors"):
            await expect(tables).to_contain_text(text)
        await expect(page.locator(".chart canvas")).to_be_visible()
        await browser.look(f"{look}-overview")
        browser.allowed = ("401 (Unauthorized)",)  # the first page with names asks for credentials
        await browser.open("clients")
        await browser.sign_in()
        await expect(page.get_by_role("link", name="meter/1")).to_be_visible()
        browser.allowed = ()
        logging.getLogger("penstock.mqtt").warning("a client is slow: %s", "its queue is full; " * 10)
        for name in PAGES:
            await browser.open(name)
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            await expect(page.locator("[aria-busy=true]")).to_have_count(0)
            await expect(page.get_by_text("Loading…")).to_have_count(0)
            await browser.look(f"{look}-{name}")
            if name in ("records/water", "events"):  # the last cell has the text: it is read without scrolling
                box = await page.locator("tbody td:last-child").first.bounding_box()
                assert box is not None
                assert (box["x"] + 200 < width, box["height"] < 200) == (True, True)


async def test_lists_are_filtered_sorted_and_paged_in_the_url(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("keys")
        await browser.sign_in()
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(50)
        await page.get_by_role("link", name="Next page").click()
        await expect(rows.first).to_contain_text("line/050")
        await page.go_back()
        await expect(rows.first).to_contain_text("line/000")
        await page.get_by_label("Contains").fill("7")
        await page.get_by_role("button", name="Apply").click()
        await expect(rows.first).to_contain_text("line/007")
        assert "q=7" in page.url
        await page.reload()
        await expect(rows.first).to_contain_text("line/007")
        await page.get_by_label("Prefix").fill("plant/")
        await page.get_by_label("Contains").fill("")
        await page.get_by_role("button", name="Apply").click()
        await expect(rows).to_have_count(1)
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Export NDJSON").click()
        path = await (await saved.value).path()
        exported = await asyncio.to_thread(Path(path).read_text)
        assert [json.loads(line)["key"] for line in exported.splitlines()] == ["plant/a"]
        await page.get_by_role("link", name="plant/a").click()
        await expect(page.locator("pre")).to_contain_text('"value": [')
        await browser.open("clients")
        await page.get_by_role("button", name="Client", exact=True).click()
        await expect(page.get_by_role("columnheader", name="Client", exact=False).first).to_have_attribute(
            "aria-sort", "ascending"
        )
        assert "sort=client_id" in page.url


async def test_a_filter_that_is_being_typed_is_not_reset(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    async with browsing(ready) as browser:
        page = browser.page
        await browser.open("topics")
        await expect(page.get_by_role("link", name="water")).to_be_visible()
        await page.get_by_label("Filter").fill("wat")
        for _ in range(2):  # the list is read again every two seconds
            async with page.expect_response(lambda response: "/api/v1/topics" in response.url):
                pass
        await expect(page.get_by_label("Filter")).to_have_value("wat")


async def test_pipelines_show_lag_dead_letters_and_the_last_error(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await browser.sign_in()
        await expect(page.get_by_role("link", name="meter/1")).to_be_visible()
        await browser.open("pipelines")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text("bottlingrunning25912\u202f3008 s")
        await expect(rows.filter(has_text="packing")).to_contain_text("disk full")
        await page.get_by_role("link", name="sorting").click()
        await expect(page.get_by_role("alert")).to_contain_text("its lease has expired")
        await browser.open("pipelines/bottling")
        await expect(page.get_by_role("cell", name="48 rows, 24.0 KiB")).to_be_visible()
        graph = page.get_by_role("region", name="Graph of the pipeline")
        await expect(graph.get_by_role("listitem")).to_have_count(7)
        await expect(graph.get_by_role("listitem").filter(has_text="bottles")).to_contain_text("lag 155, 900 ms")
        await expect(graph.get_by_role("listitem").filter(has_text="checked").first).to_contain_text("violations: 3")
        await expect(graph.locator("li.source")).to_contain_text("311 records/slag 2\u202f300, 8 s")
        await expect(graph.locator("li.step").filter(has_text="levels")).to_contain_text("state 48 rows, 24.0 KiB")
        spark = page.get_by_role("link", name="Web interface of Spark")
        await expect(spark).to_have_attribute("href", "http://line-3:4040")
        await expect(graph.locator("path.late")).to_have_count(1)
        await page.get_by_role("link", name="pipeline-bottling-…").click()
        await expect(page.get_by_label("Filter")).to_have_value("pipeline-bottling-")


async def test_the_topic_tree_shows_counts_and_the_last_payload_of_each_level(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    host, port = parse_address(ready.mqtt)
    async with browsing(ready) as browser, MqttClient(host, port, client_id="device") as client:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await browser.sign_in()
        await expect(page.get_by_role("link", name="meter/1")).to_be_visible()
        await page.get_by_role("link", name="Messages", exact=True).click()
        await page.get_by_role("link", name="Topic tree").click()
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(1, timeout=60_000)  # the retained message
        await expect(rows.first).to_contain_text("plant")
        for topic in ("plant/c/1", "plant/c/2", "hall/<b>x</b>", "/leading"):
            for value in (b"1", b"2"):
                await client.publish(topic, value)
        await expect(rows).to_have_count(3, timeout=60_000)
        await expect(rows.nth(1)).to_contain_text("hall12")
        await page.get_by_role("link", name="(empty)").click()
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_contain_text("leading12")
        await page.get_by_role("navigation", name="Levels").get_by_role("link", name="All topics").click()
        await page.get_by_role("link", name="plant", exact=True).click()
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0).locator("td").nth(5)).to_have_text("yes")
        await expect(rows.nth(1).locator("td").nth(2)).to_have_text("4", timeout=60_000)
        await browser.look("topic-tree")
        await page.get_by_role("link", name="b", exact=True).press("Enter")
        await expect(page.get_by_role("heading", name="Last message of plant/b")).to_be_visible()
        await expect(page.locator("pre")).to_contain_text('"bar": 4.5')
        await page.get_by_role("navigation", name="Levels").get_by_role("link", name="All topics").click()
        await expect(page.get_by_role("link", name="hall")).to_be_visible()
        browser.allowed = (*browser.allowed, "400 (Bad Request)", "403 (Forbidden)")
        for refused in ("watch?prefix=plant/", "tree?filter=plant/%23/b"):
            await browser.open(refused)
            await expect(page.get_by_role("alert")).to_be_visible()
            await expect(page.get_by_role("status")).to_have_count(0)  # no count, as of a stream that has begun
            await expect(page.get_by_role("button", name="Pause")).to_have_count(0)


@pytest_asyncio.fixture
async def decoding_node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with an Avro schema of the payloads of plant/c."""
    schema = {"type": "record", "name": "R", "fields": [{"name": name, "type": "int"} for name in "nm"]}
    file = tmp_path / "r.avsc"
    file.write_text(json.dumps(schema))
    payloads = [{"filter": "plant/c", "format": "avro", "schema_file": file}]
    async for node in console_node(tmp_path / "data", console={"payloads": payloads}):
        yield node


async def test_messages_are_followed_published_and_exported(decoding_node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(decoding_node)
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await browser.sign_in()
        await expect(page.get_by_role("link", name="meter/1")).to_be_visible()
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await page.get_by_label("Topic filter").fill("plant/+")
        await page.get_by_role("button", name="Subscribe").click()
        await expect(page.get_by_text("1 received")).to_be_visible()
        await expect(page.locator("details.message pre")).to_have_count(0)  # a closed one is not decoded
        await page.locator("details.message summary").click()
        await expect(page.locator("details.message pre")).to_contain_text('"bar": 4.5')  # retained, decoded from CBOR
        await page.get_by_role("button", name="hexadecimal").click()
        await expect(page.locator("details.message pre")).to_contain_text("00000000  a2 63 62 61 72")
        await browser.look("messages-live")
        await page.get_by_role("button", name="Pause").click()
        await page.get_by_text("Publish a message").click()
        await page.get_by_label("Topic", exact=True).fill("plant/c")
        await page.get_by_label("Payload", exact=True).fill("hello")
        await page.get_by_label("User Properties").fill("unit=bar\nunit=psi")
        await page.get_by_role("button", name="Publish", exact=True).click()
        await expect(page.get_by_text("Published to plant/c: 5 B, QoS 1.")).to_be_visible()
        await page.get_by_label("Retain").check()
        await page.get_by_label("Payload is").select_option("hexadecimal")
        await page.get_by_label("Payload", exact=True).fill("0a f")
        await page.get_by_role("button", name="Publish", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("The payload is not hexadecimal.")
        await page.get_by_label("Payload", exact=True).fill("0a 0e")
        await page.get_by_role("button", name="Publish", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("replaces the retained message")
        await page.get_by_role("button", name="Publish retained").click()
        await expect(page.get_by_text("Published to plant/c: 2 B, QoS 1, retained.")).to_be_visible()
        await expect(page.get_by_text("1 received")).to_be_visible()  # paused
        await page.get_by_role("button", name="Continue").click()
        await expect(page.get_by_text("3 received")).to_be_visible()
        for decoded, text in enumerate(("Schema not used", "2 B, Avro")):
            last = page.locator("details.message", has_text="plant/c").nth(1 - decoded)
            await last.locator("summary").click()
            await expect(last).to_contain_text(text)
        await expect(last.locator("pre")).to_contain_text('"n": 5')
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Export NDJSON").click()
        path = await (await saved.value).path()
        rows = [json.loads(line) for line in (await asyncio.to_thread(Path(path).read_text)).splitlines()]
        assert [row["topic"] for row in rows] == ["plant/b", "plant/c", "plant/c"]
        assert [each["value"] for each in rows[1]["user_properties"]] == ["bar", "psi"]
        await page.get_by_label("Contains").fill("nothing")
        await page.get_by_role("button", name="Subscribe").click()
        await expect(page.get_by_text("0 received, 2 without the text")).to_be_visible()
        await page.set_viewport_size({"width": 400, "height": 900})
        await browser.look("messages-live-narrow")


async def test_a_key_is_changed_after_a_preview_and_has_a_history(tmp_path: Path) -> None:
    from playwright.async_api import expect

    async for node in console_node(tmp_path, statestore={"extensions": ["as-of", "prefix-observe"]}):
        ready = await filled(node)
        async with browsing(ready) as browser:
            page = browser.page
            browser.allowed = ("401 (Unauthorized)", "409 (Conflict)", "404 (Not Found)")
            await browser.open("keys/plant%2Fa")
            await browser.sign_in()
            await page.get_by_text("Change the value").click()
            await page.locator("textarea[name=value]").fill('{"value": [1, 3]}')
            await page.get_by_role("button", name="Preview").click()
            await expect(page.locator("pre.difference")).to_contain_text("-     2")
            # The button that was pressed has disappeared: the focus stays next to it.
            await expect(page.locator("form div.action")).to_be_focused()
            await page.get_by_role("button", name="Cancel").click()
            await expect(page.get_by_role("button", name="Preview")).to_be_focused()
            await page.get_by_role("button", name="Preview").click()
            async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
                await store.set("plant/a", '{"value": [7]}')
                await page.get_by_role("button", name="Set if it still has version").click()
                await expect(page.get_by_role("alert")).to_contain_text("was changed meanwhile")
            await page.get_by_role("button", name="Load the current value").click()
            await expect(page.locator("pre").first).to_contain_text("7")
            await expect(page.locator("textarea[name=value]")).to_have_value('{"value": [1, 3]}')  # what was entered
            await page.locator("textarea[name=value]").fill('{"value": [8]}')
            await page.get_by_role("button", name="Preview").click()
            await page.get_by_role("button", name="Set if it still has version").click()
            await expect(page.get_by_text("The key was changed.")).to_be_visible()
            await page.get_by_text("History").click()
            await expect(page.get_by_text("3 versions. The key did not exist before the oldest one.")).to_be_visible()
            lines = (await page.locator("pre.difference").first.inner_text()).rstrip().split("\n")
            assert lines == ["  {", '    "value": [', "-     7", "+     8", "    ]", "  }"]
            await browser.look("key-history")
            await page.get_by_text("Watch changes").click()
            changes = page.get_by_role("region", name="Changes")
            await expect(changes.locator("summary")).to_contain_text("current value")
            async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
                await store.set("plant/a", '{"value": [9]}')
                await expect(changes.locator("summary")).to_have_count(2)
                await page.get_by_role("button", name="Load it again").click()
                await expect(page.locator("pre").first).to_contain_text("9")
                await page.get_by_role("button", name="Delete…").click()
                await expect(page.get_by_role("alert")).to_be_focused()
                await page.get_by_role("button", name="Delete the key").click()
                await expect(page.get_by_text("The key was deleted.")).to_be_visible()
                await expect(page.get_by_text("key 'plant/a' does not exist")).to_be_visible()
                await browser.open("keys?prefix=plant/")
                await page.get_by_role("link", name="Watch changes").click()
                await expect(changes.get_by_role("status")).to_have_text("0 received")
                for value in ('{"bar": 4.1, "valve": "open"}', '{"bar": 4.5, "valve": "open"}'):
                    await store.set("plant/press", value, ttl_ms=3_600_000)
                await expect(changes.locator("summary")).to_have_count(2)
                await store.set("plant/limit", "7")
                await store.delete("plant/limit")
            newest = changes.locator("summary")
            await expect(newest).to_have_count(4)
            await expect(newest.first).to_contain_text("DELETE")
            await newest.nth(2).click()
            lines = (await changes.locator("pre.difference").inner_text()).rstrip().split("\n")
            assert lines == ["  {", '-   "bar": 4.1,', '+   "bar": 4.5,', '    "valve": "open"', "  }"]
            await expect(changes.locator("dl")).to_contain_text(re.compile(r"Expires\d{4}-\d\d-\d\d [\d:]{8} UTC"))
            await browser.look("key-changes")
            async with page.expect_download() as saved:
                await page.get_by_role("button", name="Export NDJSON").click()
            exported = await asyncio.to_thread(Path(await (await saved.value).path()).read_text)
            operations = [json.loads(line)["operation"] for line in exported.splitlines()]
            assert operations == ["SET", "SET", "SET", "DELETE"]
            api = Api(ready)
            (watching,) = (await api.get("/clients?q=console-"))["rows"]
            assert (await api.send(f"/clients/{watching['client_id']}", "DELETE"))[0] == 200
            await expect(page.get_by_role("alert")).to_contain_text("The node ended the subscription.")
            await page.get_by_role("button", name="Connect again").click()
            await expect(page.get_by_role("alert")).to_have_count(0)
            await api.until("/clients?q=console-", lambda now: any(row["connected"] for row in now["rows"]))


async def test_the_keyboard_reaches_pages_filter_rows_and_help(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    async with browsing(ready) as browser:
        page = browser.page
        await browser.open()
        await expect(page.get_by_role("heading", name="Ready")).to_be_visible()
        await page.keyboard.press("g")
        await page.keyboard.press("g")
        await expect(page.get_by_role("heading", name="Consumer groups", level=1)).to_be_visible()
        await expect(page.get_by_role("link", name="lake")).to_be_visible()
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="lake", level=1)).to_be_visible()
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        # The page of the group has links to the topic, too.
        await expect(page.get_by_role("heading", name="Topics", level=1)).to_be_visible()
        await expect(page.get_by_role("link", name="water")).to_be_visible()
        await page.keyboard.press("/")
        await page.keyboard.type("gt?")  # no shortcut inside an input
        await expect(page.get_by_label("Filter")).to_have_value("gt?")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("0 of 1 rows")).to_be_visible()
        await page.get_by_role("heading", level=1).click()
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_a_problem_has_its_action_on_the_first_page_and_a_client_is_disconnected(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    host, port = parse_address(ready.mqtt)
    async with browsing(ready) as browser:
        page = browser.page
        failure: StorageError | None = StorageError(
            "the disk failed", why="input/output error", hint="replace the disk"
        )
        node.health.add_problem("tube", lambda: failure)
        await browser.open()
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("Problem, tube: the disk failed")
        await expect(alert).to_contain_text("What to do: replace the disk")
        await expect(page.get_by_role("heading", name="Not ready")).to_be_visible()
        failure = None
        await expect(page.get_by_role("heading", name="Ready", exact=True)).to_be_visible()
        async with MqttClient(host, port, client_id="meter/1", session_expiry_s=600, clean_start=False):
            browser.allowed = ("401 (Unauthorized)",)
            await browser.open("clients/meter%2F1")
            await browser.sign_in()
            await page.get_by_role("button", name="Disconnect…").click()
            await expect(page.get_by_role("alert")).to_contain_text("Its session stays")
            await page.get_by_role("button", name="Disconnect", exact=True).click()
            async with asyncio.timeout(60):
                while node.security.server.stats.connections_opened < 6:  # it connects again
                    await asyncio.sleep(0.02)
        logging.getLogger("penstock.mqtt").warning("a client is slow")
        await browser.open()
        newest = page.get_by_role("region", name="Newest events", exact=True)
        await expect(newest.locator("tbody tr").first).to_contain_text("a client is slow")
        await newest.get_by_role("link", name="events").click()
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Password or token").fill("wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_label("Password or token")).to_have_value("")
        await expect(page.get_by_role("button", name="Sign out")).to_have_count(0)


async def test_offsets_are_reset_after_a_preview(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("keys")
        await browser.sign_in()
        await browser.open("groups/lake")
        await page.get_by_text("Reset offsets").click()
        await page.locator("details select").first.select_option("latest")
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_role("alert")).to_contain_text("records are skipped, in 3 partitions")
        await browser.look("reset")
        assert node.console.tube is not None
        assert (await node.console.tube.total_lag())[0] > 0
        await page.get_by_role("button", name="Reset:").click()
        await expect(page.get_by_role("button", name="Preview")).to_be_focused()
        await expect(page.get_by_role("status")).to_contain_text("The offsets of 3 partitions were reset")
        assert (await node.console.tube.total_lag())[0] == 0
        await page.locator("details select").first.select_option("time")
        await page.get_by_label("Local time").fill("2020-01-01T00:00:00")
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_role("alert")).to_contain_text("32 records are read again")
        utc = re.compile(r", to (2020-01-01|2019-12-31) [\d:]{8} UTC\.$")
        await expect(page.get_by_role("alert")).to_have_text(utc)
        await page.locator("details select").first.select_option("shift")
        await page.get_by_label("Records in each partition").fill("1")
        await page.locator("select[name=place]").select_option(index=1)
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_role("alert")).to_contain_text("1 record is read again, in 1 partition.")
        await node.console.tube.reset("lake", "earliest", dry_run=False)
        browser.allowed = ("409 (Conflict)",)
        await page.get_by_role("button", name="Reset:").click()
        await expect(page.get_by_role("alert")).to_contain_text("the offsets of group 'lake' changed meanwhile")
        await page.locator("details select").first.select_option("offset")
        browser.allowed = ("400 (Bad Request)",)
        await page.get_by_label("Offset", exact=True).fill("280000")
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_role("alert")).to_contain_text("offset 280000 is not stored")


CLUSTER = ClusterSnapshot(
    name="plant",
    active="one",
    term=7,
    members=(
        ClusterMember("one", "active", True, "0.1.0", "10.0.0.1:1883", "10.0.0.1:8080", 0, 0.0, None),
        ClusterMember("two", "standby", True, "0.1.0", "10.0.0.2:1883", "10.0.0.2:8080", 3, 0.2, None),
        ClusterMember("three", "blocked", False, "0.1.0", "10.0.0.3:1883", "10.0.0.3:8080", None, None,
                      "mqtt: etcd has another log"),
    ),
    commits={"statestore": 1250, "mqtt": 98},
    etcd=(
        EtcdSnapshot("10.0.0.1:2379", "3.6.1", True, 3 << 20, 2 << 30),
        EtcdSnapshot("10.0.0.2:2379", "3.5.9", False, 3 << 20, None, ("memberID:1 alarm:NOSPACE",)),
        EtcdSnapshot("10.0.0.3:2379", problem="connection refused"),
    ),
    commit_wait_s=0.05,
)  # fmt: skip


async def test_the_cluster_is_a_page_only_of_a_node_in_one(node: Node, tmp_path: Path) -> None:
    from playwright.async_api import expect

    node.console.show_cluster(lambda: replace(CLUSTER, reasons=cluster_reasons(CLUSTER)))
    ready = await node.start()
    async with browsing(ready) as browser:
        page = browser.page
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("cluster")
        await browser.sign_in()
        await expect(page.get_by_role("heading", name="Cluster plant")).to_be_visible()
        browser.allowed = ()
        await expect(page).to_have_title("Cluster · penstock")
        await expect(page.get_by_role("note")).to_have_count(2)
        blocked = page.get_by_role("note").first
        await expect(blocked).to_contain_text("Warning, cluster: three cannot become active")
        await expect(blocked).to_contain_text("Why: mqtt: etcd has another log")
        await expect(page.get_by_role("alert")).to_contain_text("What to do: run etcdctl defrag")
        facts = page.locator("dl.facts")
        await expect(facts).to_contain_text("Standbys that can take over1")
        await expect(facts).to_contain_text("Commits wait for etcd50 ms")
        rows = page.get_by_role("region", name="Members").locator("tbody tr")
        assert [" ".join(text.split()) for text in await rows.all_inner_texts()] == [
            "one active yes 0 \u2013 10.0.0.1:1883 10.0.0.1:8080 0.1.0",
            "two standby yes 3 200 ms 10.0.0.2:1883 10.0.0.2:8080 0.1.0",
            "three blocked no \u2013 \u2013 10.0.0.3:1883 10.0.0.3:8080 0.1.0",
        ]
        etcd = page.get_by_role("region", name="etcd").locator("tbody tr")
        assert [" ".join(text.split()) for text in await etcd.all_inner_texts()] == [
            "10.0.0.1:2379 leader 3.0 MiB 2.0 GiB none 3.6.1",
            "10.0.0.2:2379 follower 3.0 MiB \u2013 memberID:1 alarm:NOSPACE 3.5.9",
            "10.0.0.3:2379 no answer \u2013 \u2013 \u2013 \u2013",
        ]
        await browser.look("light-cluster")
        await page.emulate_media(color_scheme="dark")
        await browser.look("dark-cluster")
        await page.set_viewport_size({"width": 400, "height": 900})
        await browser.look("narrow-cluster")
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        await expect(page.get_by_role("heading", name="TubeMQ topics")).to_be_visible()
        await page.keyboard.press("g")
        await page.keyboard.press("n")
        await expect(page.get_by_role("heading", name="Cluster plant")).to_be_visible()
        await expect(page.get_by_role("link", name="Cluster", exact=True)).to_have_attribute("aria-current", "page")
        async for alone in console_node(tmp_path / "alone"):
            browser.ready = await alone.start()
            await browser.open("cluster")
            await expect(page.get_by_text("This node is not in a cluster")).to_be_visible()
            await expect(page.get_by_role("link", name="Cluster", exact=True)).to_have_count(0)


async def test_it_works_below_a_path_of_a_proxy(node: Node) -> None:
    from playwright.async_api import expect

    ready = await filled(node)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        method, path, version = first.split(b" ")
        if not path.startswith(b"/edge/"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            above, back = await asyncio.open_connection(*parse_address(ready.http))
            rest = rest.replace(b"keep-alive", b"close")
            back.write(b" ".join((method, path.removeprefix(b"/edge"), version)) + b"\r\n" + rest)
            writer.write(await above.read())
            back.close()
        writer.close()

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with proxy, browsing(ready) as browser:
        browser.ready = ReadyNode(**{**_fields(ready), "http": f"127.0.0.1:{port}/edge"})
        await browser.open()
        await expect(browser.page.get_by_role("heading", name="Ready")).to_be_visible()


def _fields(ready: ReadyNode) -> dict[str, Any]:
    return {name: getattr(ready, name) for name in ready.__dataclass_fields__}


async def test_a_terminal_gets_the_list_of_paths(node: Node) -> None:
    ready = await node.start()
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        f"import urllib.request as r; print(r.urlopen('http://{ready.http}/').read().decode())",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await done.communicate()
    assert b"/webapi.htm" in out

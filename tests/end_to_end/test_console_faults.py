"""The web console in Chromium with odd names, lost responses and a page that stays open."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest_asyncio

from penstock.mqtt.client import MqttClient
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from tests.end_to_end.console_browser import Browser, browsing, console_node
from tests.unit.node.test_node import token_of

ODD = "50% #1/+?&=ü"
"""Characters with a meaning in URLs, and one outside of ASCII."""
BINARY = b"\xff\x00/?"
UNREACHABLE = "The node does not respond."

HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
LIB = 'const lib = await import(document.querySelector("script[type=module]").src.replace("main.js", "lib.js"));'


@pytest_asyncio.fixture
async def ready(tmp_path: Path) -> AsyncIterator[ReadyNode]:
    async for node in console_node(tmp_path):
        yield await _filled(node)


async def _filled(node: Node) -> ReadyNode:
    ready = await node.start()
    host, port = parse_address(ready.mqtt)
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        for key in (ODD, "..", "two\nlines", BINARY, "lines"):
            await store.set(key, "a\r\nb\r\n" if key == "lines" else "of this key")
    async with MqttClient(host, port, client_id=ODD, session_expiry_s=600) as client:
        await client.publish(ODD.replace("#", "").replace("+", ""), b"kept", retain=True)
        await client.publish("plant/a", b"1")
    async with Consumer(ready.tube_master, "lake", ["water"]) as consumer:
        async for _ in consumer:
            break
    return ready


async def _signed_in(browser: Browser, route: str) -> Any:
    browser.allowed = ("401 (Unauthorized)",)
    await browser.open(route)
    await browser.sign_in()
    return browser.page


async def test_names_with_any_characters_are_addresses(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async with browsing(ready) as browser:
        page = await _signed_in(browser, "keys")
        for title in (ODD, "..", "two lines", "base64:/wAvPw=="):
            await browser.open("keys")
            await page.get_by_role("link", name=title, exact=True).click()
            heading = title if title != ".." else "base64:Li4="
            for _ in range(2):
                await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
                await expect(page.locator("pre").first).to_have_text("of this key")
                await page.reload()
        # The last one is written and deleted by its bytes, and its history and changes are its own.
        await page.get_by_text("Change the value").click()
        await page.locator("textarea[name=value]").fill("another")
        await page.get_by_role("button", name="Preview").click()
        await page.get_by_role("button", name="Set if it still has version").click()
        await expect(page.locator("pre").first).to_have_text("another")
        await page.get_by_text("Watch changes").click()
        changes = page.get_by_role("region", name="Changes")
        await expect(changes.locator("summary")).to_contain_text("another")
        browser.allowed = ("404 (Not Found)",)
        await page.get_by_role("button", name="Delete…").click()
        await page.get_by_role("button", name="Delete the key").click()
        await expect(page.get_by_text("The key was deleted.")).to_be_visible()
        await browser.open("keys")
        await page.get_by_text("New key").click()
        await page.get_by_label("Key", exact=True).fill(".")
        await page.get_by_role("button", name="Create").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("base64:Lg==")
        await page.get_by_role("link", name="Clients").click()
        await page.get_by_role("link", name=ODD).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(ODD)
        await expect(page.locator("dl.facts")).to_contain_text("offline")
        await browser.open("retained")
        await page.locator("tbody a").click()
        await expect(page.locator("pre")).to_have_text("kept")
        # An address that was typed.
        await browser.open("topics/50%")
        await expect(page.get_by_role("alert")).to_contain_text("topic '50%' is not on this node")
        for route in ("records", "dead-letters", "ledger"):
            await browser.open(route)
            await expect(page.get_by_role("heading", level=1)).to_contain_text("The address names no")
        await browser.open("groups")
        await page.get_by_role("link", name="lake").press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("lake")
        await expect(page.locator("main")).to_be_focused()  # the link is gone

    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        assert await store.get(BINARY) is None
        assert await store.get(BINARY.decode("latin-1")) is None


async def test_lost_responses_are_shown_and_an_error_of_a_page_is_not_a_blank_one(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async with browsing(ready) as browser:
        page = await _signed_in(browser, "keys")
        alert = page.get_by_role("alert")
        facts = page.locator("dl.facts").first
        browser.allowed = ("Failed to load resource", "TypeError")
        for route, path in (
            ("groups/lake", "groups/lake"), ("topics/water", "topics/water"), ("events", "events"),
            (f"clients/{quote(ODD, safe='')}", "clients/*"),
        ):  # fmt: skip
            pattern = f"**/api/v1/{path}*"
            async with page.expect_response(pattern):  # until then the page before it is visible
                await browser.open(route)
            shown = page.get_by_role("region", name="Events", exact=True) if route == "events" else facts
            await expect(shown).to_be_visible()
            await page.route(pattern, lambda each: each.abort())
            await expect(alert).to_contain_text(UNREACHABLE)
            await expect(shown).to_be_visible()  # the last data
            await page.unroute(pattern)
            await expect(alert).to_have_count(0)
        # A page that is read once, and the state of the node.
        key, overview = "**/api/v1/keys/lines*", "**/api/v1/overview*"
        await page.route(key, lambda each: each.abort())
        await browser.open("keys/lines")
        await expect(alert).to_contain_text(UNREACHABLE)
        await page.unroute(key)
        await expect(facts).to_be_visible()
        await browser.open("overview")
        heading = page.get_by_role("heading", level=1)
        await expect(heading).to_have_text("Ready")
        await page.route(overview, lambda each: each.abort())
        await expect(heading).to_have_text("Unknown")
        await expect(page.get_by_text("when the node was ready")).to_be_visible()
        await page.unroute(overview)
        await expect(heading).to_have_text("Ready")
        await page.route("**/api/v1/groups/lake", lambda each: each.fulfill(json={}))
        await browser.open("groups/lake")
        await expect(alert).to_contain_text("This page cannot be shown: TypeError")
        await page.get_by_role("link", name="Topics").click()
        await expect(page.get_by_role("link", name="water")).to_be_visible()
        await browser.open("groups/lake")
        await expect(alert).to_contain_text("This page cannot be shown")
        await page.unroute("**/api/v1/groups/lake")
        await page.get_by_role("button", name="Try again").click()
        await expect(facts).to_be_visible()
        # A page of a proxy.
        await page.route("**/api/v1/groups/lake", lambda each: each.fulfill(body="<html>Sign in</html>"))
        await expect(alert).to_contain_text("The response is not one of a node.")
        await page.unroute("**/api/v1/groups/lake")
        async with Consumer(ready.tube_master, "lake", ["water"]):
            await expect(page.get_by_text("stop its consumers first")).to_be_visible()
        browser.allowed = ()


async def test_a_page_that_stays_open(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async with browsing(ready) as browser:
        page = browser.page
        await browser.open()
        await expect(page.locator(".u-legend")).to_contain_text("Time (UTC)")
        # One request at a time: an older response never replaces a newer one, and nothing is shown twice.
        counts = await page.evaluate(
            f"""async () => {{
              {LIB}
              const set = {HIDE};
              let [running, most, release] = [0, 0, null];
              const stop = lib.poll(async () => {{
                most = Math.max(most, running += 1);
                await new Promise((done) => {{ release = done; }});
                running -= 1;
                return 0;
              }});
              for (let n = 0; n < 3; n += 1) {{
                set(true);
                set(false);
              }}
              const during = running;
              release();
              while (running === 0) await new Promise((done) => setTimeout(done, 1));
              stop();
              return [during, most];
            }}"""
        )
        assert counts == [1, 1]
        texts = await page.evaluate(
            f"""async () => {{
              {LIB}
              const {{ name, parameters }} = lib.parseRoute("#/keys/50%?prefix=a?b");
              const times = [0, -1, 1e18, 253402300800000].map(lib.clock);
              return [name, parameters.prefix, ...times];
            }}"""
        )
        assert texts == [
            "50%", "a?b", "1970-01-01 00:00:00", "1969-12-31 23:59:59", "1000000000000000000", "+010000-01-01 00:00:00"
        ]  # fmt: skip
        # Without credentials a page is read once, however long it stays open.
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/api/v1/clients" in request.url else None)
        await page.clock.install()
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        await expect(page.get_by_label("Password or token")).to_be_visible()
        await page.clock.fast_forward(60_000)
        await expect(page.get_by_label("Password or token")).to_be_visible()
        assert len(asked) == 1
        await browser.sign_in()
        await expect(page.get_by_role("link", name=ODD)).to_be_visible()
        browser.allowed = ()
        # A hidden page holds no subscription, and says so afterwards.
        for route, stream in (("messages", "messages"), ("tree", "topic-tree")):
            # The page listens to whether it is hidden before it sends its request.
            async with page.expect_request(f"**/api/v1/{stream}?*"):
                await browser.open(f"{route}?filter=plant/%23")
            await page.evaluate(HIDE, True)
            await page.clock.fast_forward(90_000)
            await page.evaluate(HIDE, False)
            gap = re.compile(r"nothing was received for 1 min \d+ s, while the page was hidden")
            await expect(page.get_by_text(gap)).to_be_visible()
        await browser.open("keys/lines")
        await page.get_by_text("Change the value").click()
        await page.locator("textarea[name=value]").fill("a\nc\n")
        await page.get_by_role("button", name="Preview").click()
        lines = (await page.locator("pre.difference").inner_text()).split()
        assert lines == ["a", "-", "b", "+", "c"]  # the first line keeps its end
        await page.get_by_role("button", name="Set if it still has version").click()
        await expect(page.get_by_text("The key was changed.")).to_be_visible()
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        entry = await store.get("lines")
        assert entry is not None
        assert entry.value == b"a\r\nc\r\n"


async def test_an_empty_node_says_how_to_begin(tmp_path: Path) -> None:
    from playwright.async_api import expect

    async for node in console_node(tmp_path):
        async with browsing(await node.start()) as browser:
            page = await _signed_in(browser, "keys")
            browser.allowed = ()
            for route, command in (
                ("keys", "penstock kv set"), ("groups", "penstock tube consume"), ("retained", "penstock mqtt pub"),
                ("subscriptions", "penstock mqtt sub"), ("pipelines", "penstock pipeline run"),
            ):  # fmt: skip
                await browser.open(route)
                await expect(page.get_by_text(command)).to_be_visible()
            await page.get_by_label("Filter").fill("x")
            await page.get_by_role("button", name="Apply").click()
            await expect(page.get_by_text("0 rows, 0 on this page")).to_be_visible()


async def test_credentials_that_are_no_longer_valid_lose_nothing_that_was_entered(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async def expire() -> None:
        await page.evaluate("sessionStorage.setItem('penstock.authorization', 'Bearer of-yesterday')")

    async with browsing(ready) as browser:
        page = await _signed_in(browser, "keys/lines")
        await page.get_by_text("Change the value").click()
        await page.locator("textarea[name=value]").fill("entered")
        await page.get_by_role("button", name="Preview").click()
        await expire()
        await page.get_by_role("button", name="Set if it still has version").click()
        await browser.sign_in()
        await expect(page.locator("textarea[name=value]")).to_have_value("entered")
        await page.get_by_role("button", name="Preview").click()
        await page.get_by_role("button", name="Set if it still has version").click()
        await expect(page.locator("pre").first).to_have_text("entered")

        await browser.open("messages")
        await page.get_by_text("Publish a message").click()
        await page.get_by_label("Topic", exact=True).fill("plant/state")
        await page.get_by_label("Payload", exact=True).fill("entered")
        await expire()
        publish = page.get_by_role("button", name="Publish", exact=True)
        await publish.click()
        await browser.sign_in()
        await expect(page.get_by_text("Do it again with the new credentials.")).to_be_visible()
        await publish.click()
        await expect(page.get_by_role("status")).to_contain_text("Published to plant/state: 7 B")


async def test_the_keyboard_suffices_to_sign_in(ready: ReadyNode) -> None:
    from playwright.async_api import expect

    async with browsing(ready) as browser:
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("clients")
        page = browser.page
        user, secret = page.get_by_label("User name"), page.get_by_label("Password or token")
        await expect(user).to_be_focused()
        await page.keyboard.type("ann ü")
        await page.keyboard.press("Tab")
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("this node has no users")
        await expect(user).to_have_value("ann ü")
        await expect(secret).to_be_focused()
        await user.fill("")
        await secret.fill("wörter €")  # a password, and characters that are in no header
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).not_to_contain_text("this node has no users")
        await secret.fill(token_of(Path(ready.data_dir)))
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()

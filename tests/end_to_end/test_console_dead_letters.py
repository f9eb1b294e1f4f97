"""Dead letters in Chromium: a record is corrected and redriven, letters are closed after a preview."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.node import pipeline_commands
from penstock.node.config.node import PipelineSection, TopicSection, Tube
from penstock.node.node import Node
from penstock.node.web import WebConsole
from penstock.statestore.client.client import StateStoreClient
from tests.end_to_end.console_browser import LOOKS, STATUS, browsing
from tests.tools import skip_or_fail
from tests.unit.node.test_dead_letters import TOPIC, dead_run, read_from
from tests.unit.node.test_node import config
from tests.unit.pipelines.recorded_run import RecordedRun

GROUP = {"step": "parsed", "code": "parse.not_json", "reason": "not JSON", "letters": 2, "open": 2, "corrected": 0}
LETTER = {
    "id": "id-0", "step": "parsed", "code": "parse.not_json", "source": "source", "reason": "not JSON",
    "place": "telemetry 1:0@0", "timestamp": "2024-05-01T00:00:00+00:00", "state": "open", "key": "k",
    "headers": [["site", "north"]], "value": "{0", "corrected": None, "part": 3,
}  # fmt: skip
SHOWN = [LETTER, LETTER | {"part": 4}]
ROWS = {
    "list": [GROUP | {"redriven": 0, "resolved": 0, "discarded": 0}],
    "show": SHOWN,
}
CHANGES = [
    {"mark": "~", "what": "step parsed", "text": "parse a -> parse b"},
    {"mark": "!", "what": "sink rows", "text": "its column x has another type"},
]
SUMS = {"batches": 42, "read": 12_400, "exploded": 0, "out": 12_380, "dead": 20, "filtered": 0, "duplicates": 0}
LEDGER = {"sink": "bottles", "batch": 41, "version": 3, **SUMS, "late": 0}
RECONCILED = LEDGER | {"ok": True, "off": [], "unknown": []}
OFF = "the table has 36 rows of batch 12, the ledger has 37"
STEP = {
    "step": "parsed", "kind": "parse", "live": 96, "filtered": 0, "dead": 4,
    "rows": [{"line": "line-3", "pressure": 4.5, "at": "2026-11-26T10:00:00.000Z", "note": None} for _ in range(3)],
    "rejections": [{"code": "parse.not_json", "reason": "not JSON", "rows": 4}],
}  # fmt: skip
COMMANDS = ROWS | {
    "plan": [{"pipeline": "plain", "changes": CHANGES}],
    "status": [LEDGER, LEDGER | {"sink": "alarms"}],
    "reconcile": [RECONCILED, RECONCILED | {"sink": "alarms", "ok": False, "off": [OFF]}],
    "sample": [STEP, STEP | {"step": "checked", "kind": "expect", "rejections": [], "dead": 0}],
}
CANNED = (
    f"import json, sys\nverb = sys.argv[3 if sys.argv[2] == 'dead-letter' else 2]\n"
    f"for row in {COMMANDS}[verb]: print(json.dumps(row))\nsys.exit(verb in ('plan', 'reconcile'))"
)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return dead_run(tmp_path / "run")


@pytest.fixture
async def node(tmp_path: Path, run: RecordedRun) -> AsyncIterator[Node]:
    if not WebConsole().available:
        skip_or_fail("the libraries of the console are not fetched: python tools/console_libraries.py")
    pipelines = {"plain": PipelineSection(file=run.file, state_dir=run.state)}
    tube = Tube(topics={TOPIC: TopicSection(partitions=1)})
    found = Node(config(tmp_path / "data", pipelines=pipelines, tube=tube))
    try:
        yield found
    finally:
        await found.close()


@pytest.mark.parametrize(
    "look", [*(pytest.param(look, marks=pytest.mark.nightly) for look in ("light", "dark")), "narrow"]
)
async def test_letters_are_corrected_redriven_and_discarded(
    node: Node, run: RecordedRun, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.async_api import expect

    # The actions are tried in one look, because each is a process that loads pyarrow; by day without the browser:
    # tests/unit/node/test_dead_letters.py.
    if look != "light":
        monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", CANNED))
    ready = await node.start()
    read_from(run, ready.tube_master)
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        await store.set("penstock/pipeline/plain/run", json.dumps(STATUS))
    width, scheme = LOOKS[look]
    async with browsing(ready, width, scheme) as browser:
        page = browser.page
        page.set_default_timeout(60_000)  # each action starts a process
        expect.set_options(timeout=60_000)
        browser.allowed = ("401 (Unauthorized)",)
        await browser.open("pipelines")
        await browser.sign_in()
        await page.get_by_role("link", name="plain").click()
        if look != "light":
            await page.get_by_role("button", name="Compare the file with the last run").click()
            await expect(page.locator(".plan li")).to_have_count(len(CHANGES))
            await expect(page.locator(".plan li").last).to_contain_text("cannot continue")
            await browser.look(f"{look}-plan")
            await page.get_by_role("button", name="Count the dead letters of each step").click()
            await expect(page.get_by_role("status").last).to_contain_text("2 dead letters are open")
            step = page.locator("li.node").filter(has_text="parsed").first
            await expect(step.get_by_role("link", name="2 open dead letters")).to_be_visible()
            await browser.look(f"{look}-letters-of-steps")
            await page.get_by_role("link", name="Counts of all runs, reconcile").click()
            await expect(page.get_by_role("region", name="Ledger")).to_contain_text("12\u202f380")
            await page.get_by_role("button", name="Reconcile").click()
            await expect(page.get_by_role("status")).to_contain_text("1 sink has differences.")
            await expect(page.get_by_role("region", name="Result of each sink")).to_contain_text("alarmsoff")
            await expect(page.get_by_text(OFF)).to_be_visible()
            await browser.look(f"{look}-ledger")
            if look == "narrow":  # for the documentation
                await page.set_viewport_size({"width": 1280, "height": 900})
                await browser.look("light-ledger")
                await page.set_viewport_size({"width": width, "height": 900})
            await page.go_back()
            await step.get_by_role("link", name="sample rows").click()
            await expect(page.get_by_role("combobox", name="Step")).to_have_value("parsed")
            await page.get_by_role("button", name="Sample").click()
            await expect(page.get_by_role("status")).to_contain_text("Step parsed, the newest 100 records")
            await expect(page.get_by_role("region", name="Rows after parsed")).to_contain_text("4.5")
            await browser.look(f"{look}-sample")
            await page.go_back()
        await page.get_by_role("link", name="List, correct, redrive").click()
        letters = page.locator("details.letter")
        await expect(letters).to_have_count(2)
        await letters.first.locator("summary").click()
        await expect(letters.first.locator("pre")).to_contain_text("{0")
        await browser.look(f"{look}-dead-letters")
        if look != "light":
            await expect(letters.first.locator("dl")).to_contain_text("Part3")
            # A preview is that of its selection: it is gone when another one is shown.
            await page.route(
                "**/redrive?*", lambda each: each.fulfill(json={"dry_run": True, "letters": 2, "notes": []})
            )
            await page.get_by_role("button", name="Redrive…").first.click()
            await expect(page.get_by_text("2 letters would be sent")).to_be_visible()
            await page.get_by_role("region", name="Reasons").get_by_role("link", name="parsed").click()
            await expect(page.get_by_role("heading", name="Letters of the step parsed")).to_be_visible()
            await expect(page.get_by_text("2 letters would be sent")).to_have_count(0)
            # A letter stays open in another order, also next to another part of its record.
            reversed_rows = {"rows": SHOWN[::-1], "complete": True}
            await page.route("**/dead-letters/records?*", lambda each: each.fulfill(json=reversed_rows))
            await page.get_by_role("link", name="Include closed letters").click()
            await expect(letters.first.locator("dl")).to_contain_text("Part4")
            await expect(letters.first).not_to_have_attribute("open", "")
            await expect(letters.last).to_have_attribute("open", "")
            return
        await letters.first.get_by_label("Corrected payload").fill('{"x": 7}')
        await letters.first.get_by_role("button", name="Save the correction").click()
        await expect(page.get_by_role("status")).to_contain_text("The corrected payload was stored")
        await expect(letters.first).to_contain_text("corrected parsed: not JSON")
        await expect(letters.first).to_have_attribute("open", "")  # while the letters were read again
        await letters.first.get_by_role("button", name="Redrive…").click()
        await expect(page.get_by_role("alert")).to_contain_text("1 letter would be sent to the source again")
        await browser.look(f"{look}-dead-letters-preview")
        await page.get_by_role("button", name="Redrive: 1 letter").click()
        await expect(page.get_by_role("status")).to_contain_text("1 letter was sent to the source again")
        await expect(letters).to_have_count(1)
        await page.get_by_role("button", name="Discard…").first.click()
        await page.get_by_role("button", name="Discard: 1 letter").click()
        await expect(page.get_by_role("status")).to_contain_text("1 letter was discarded")
        await expect(letters).to_have_count(0)
        await page.get_by_label("older than").fill("36500")
        await page.get_by_role("button", name="Delete closed letters…").click()
        await expect(page.get_by_role("alert")).to_contain_text("No letter would be deleted")
        await page.get_by_label("older than").fill("30")
        await expect(page.get_by_role("alert")).to_have_count(0)  # the preview of other days
        await page.get_by_role("button", name="Delete closed letters…").click()
        await expect(page.get_by_role("alert")).to_contain_text("2 letters would be deleted. They cannot be restored.")
        await page.get_by_role("button", name="Delete closed letters: 2 letters").click()
        await expect(page.get_by_role("status")).to_contain_text("2 letters were deleted")
        await expect(page.get_by_text("There are no dead letters.")).to_be_visible()

"""The documentation site in a browser: search finds the right page first, code is not cut off, nothing is fetched.

Chromium reads the built pages from the disk, without network access.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.tools import require_tool

QUERIES = {
    "install": "Install penstock",
    "authorization": "Authorization: policies",
    "authentication": "Authentication: users, certificates and tokens",
    "quickstart": "Quick start: state store",
    "dead letter queue": "Dead letter queue: inspect, correct and redrive records",
    "console": "Monitor a node: web console, status, top",
    "upgrade": "Upgrade",
    "backup": "Backup and restore",
    "docker": "Deploy with systemd, containers or Kubernetes",
    "kubernetes": "Deploy with systemd, containers or Kubernetes",
    "durability": "Durability",
    "own process": "Run TubeMQ in its own process",
    "kafka": "Migrate a Spark job from Kafka",
    "mosquitto": "Migrate from Mosquitto",
    "websocket": "Connect from a browser over WebSocket",
    "tls": "Encrypt MQTT with TLS",
    "metrics": "Metrics",
    "configuration": "Configuration",
}
"""What a reader types, and the title of the page that must come first."""

WIDTHS = (1280, 400)

SCRIPT = """<!doctype html><body><iframe id=f></iframe><script>
const frame = document.getElementById("f");
const load = (url) => new Promise((done) => { frame.onload = done; frame.src = url; });
(async () => { const found = await (%s)(); document.body.textContent = "result " + JSON.stringify(found) + " end"; })();
</script></body>"""
"""A page that loads pages of the site in a frame, and then consists of the result of a function as JSON."""

SEARCH = """async () => {
  const titles = {};
  for (const query of %s) {
    await load("search.html?q=" + encodeURIComponent(query));
    for (let n = 0; n < 200 && !frame.contentDocument.body.textContent.includes("Search finished"); n++)
      await new Promise((done) => setTimeout(done, 50));
    const items = [...frame.contentDocument.querySelectorAll("ul.search > li > a")];
    titles[query] = items.slice(0, 3).map((item) => item.textContent.trim());
  }
  return titles;
}"""

MEASURE = """async () => {
  const clipped = [];
  let measured = 0;
  for (const page of %s) {
    await load(page);
    for (const width of %s) {
      frame.style.width = width + "px"; frame.style.height = "900px";
      for (const block of frame.contentDocument.querySelectorAll("pre"))
        if (block.scrollWidth > block.clientWidth + 1)
          clipped.push(`${page} at ${width}: ${block.textContent.slice(0, 60)}`);
      measured++;
    }
  }
  return {measured, clipped};
}"""


def chromium(url: str, *flags: str, budget_ms: int = 10_000) -> str:
    """The DOM of a page after its scripts have run."""
    done = subprocess.run(
        [
            require_tool("chromium"),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", *flags),
            *(f"--virtual-time-budget={budget_ms}", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


def evaluated(site: Path, name: str, function: str) -> Any:
    """The result of a JavaScript function that loads pages of the site; one start of the browser for all of them."""
    (site / name).write_text(SCRIPT % function, encoding="utf-8")
    dom = chromium(f"file://{site}/{name}", "--allow-file-access-from-files", budget_ms=600_000)
    found = re.search(r"result (.*) end", html.unescape(dom), re.DOTALL)
    assert found is not None, dom[-2000:]
    return json.loads(found[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without what costs most of its processor time: the tree of all pages beside each page, and the
    summaries of pages in search, which cost two seconds per query."""
    require_tool("chromium")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"),
            *("-t", "no_navigation", "-D", "html_show_search_summary=0", str(ROOT / "docs"), str(folder)),
        ],
        check=True,
        timeout=240,
    )
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "queries", [pytest.param([*QUERIES][:6], id="6"), pytest.param([*QUERIES], id="all", marks=pytest.mark.nightly)]
)
def test_search_finds_the_right_page_first(site: Path, queries: list[str]) -> None:
    """The other pages every night: the browser needs a second of processor time for each."""
    titles = evaluated(site, "searched.html", SEARCH % json.dumps(queries))
    assert {query: found[:1] for query, found in titles.items()} == {query: [QUERIES[query]] for query in queries}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_no_code_is_cut_off(site: Path) -> None:
    pages = sorted(
        str(page.relative_to(site))
        for page in site.rglob("*.html")
        if page.name not in {"measured.html", "searched.html"} and "<pre" in page.read_text(encoding="utf-8")
    )
    assert len(pages) > 60
    result = evaluated(site, "measured.html", MEASURE % (json.dumps(pages), json.dumps(WIDTHS)))
    assert result == {"measured": len(pages) * len(WIDTHS), "clipped": []}


def test_pages_have_copy_buttons_and_a_theme_switch(site: Path) -> None:
    dom = chromium(f"file://{site}/get-started/install.html")
    assert dom.count('class="copybtn') >= 2
    assert "theme-toggle" in dom


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\srel="stylesheet"[^>]*href="http"""
    )
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))]

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
from urllib.parse import quote

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
    "docker": "Deploy with systemd or Docker",
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

MEASURE = """<!doctype html><body><iframe id=f></iframe><script>
const pages = %s, widths = %s, frame = document.getElementById("f"), clipped = [];
const load = (url) => new Promise((done) => { frame.onload = done; frame.src = url; });
(async () => {
  for (const width of widths) {
    frame.style.width = width + "px"; frame.style.height = "900px";
    for (const page of pages) {
      await load(page);
      for (const block of frame.contentDocument.querySelectorAll("pre"))
        if (block.scrollWidth > block.clientWidth + 1)
          clipped.push(`${page} at ${width}: ${block.textContent.slice(0, 60)}`);
    }
  }
  document.body.textContent = "measured " + pages.length * widths.length + " " + JSON.stringify(clipped);
})();
</script></body>"""


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    require_tool("chromium")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(ROOT / "docs"), str(folder)],
        check=True,
        timeout=240,
    )
    return folder


def found(site: Path, query: str) -> list[str]:
    """Titles of the search results, best first."""
    dom = chromium(f"file://{site}/search.html?q={quote(query)}")
    items = re.findall(r'<ul[^>]*class="search".*?</ul>', dom, re.DOTALL)
    assert items, dom[-2000:]
    titles = re.findall(r"<li[^>]*>\s*<a[^>]*>(.*?)</a>", items[0], re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", title)).strip() for title in titles]


@pytest.mark.timeout(300)
def test_search_finds_the_right_page_first(site: Path) -> None:
    wrong = {query: titles[:3] for query, title in QUERIES.items() if (titles := found(site, query))[:1] != [title]}
    assert not wrong


@pytest.mark.timeout(300)
def test_no_code_is_cut_off(site: Path) -> None:
    pages = sorted(
        str(page.relative_to(site))
        for page in site.rglob("*.html")
        if page.name not in {"search.html", "genindex.html"}
    )
    (site / "measure.html").write_text(MEASURE % (json.dumps(pages), json.dumps(WIDTHS)), encoding="utf-8")
    dom = chromium(f"file://{site}/measure.html", "--allow-file-access-from-files", budget_ms=600_000)
    measured = re.search(r"measured (\d+) (\[.*\])", html.unescape(dom))
    assert measured is not None, dom[-2000:]
    assert int(measured[1]) == len(pages) * len(WIDTHS)
    assert json.loads(measured[2]) == []


def test_pages_have_copy_buttons_and_a_theme_switch(site: Path) -> None:
    dom = chromium(f"file://{site}/get-started/install.html")
    assert dom.count('class="copybtn') >= 2
    assert "theme-toggle" in dom


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\srel="stylesheet"[^>]*href="http"""
    )
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))]

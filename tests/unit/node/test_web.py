"""The web console's page and files: policy, cache, and a checkout without its libraries."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from pathlib import Path

from penstock.node.web import FOLDER, WebConsole
from tests.unit.node.test_http_access import ask, running
from tests.unit.node.test_node import config
from tools import console_libraries


def copied(folder: Path) -> Path:
    """The files of the console with empty libraries."""
    (folder / "vendor").mkdir(parents=True)
    for path in FOLDER.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    for name in console_libraries.FILES:
        (folder / "vendor" / name).write_text("")
    return folder


def test_the_policy_permits_the_import_map_and_files_of_the_node_only(tmp_path: Path) -> None:
    response = WebConsole(copied(tmp_path / "web")).page()
    page = bytes(response.body).decode()
    policy = response.headers["content-security-policy"]
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    inline = [text for attributes, text in scripts if "src=" not in attributes]
    assert len(inline) == 1
    assert f"'sha256-{base64.b64encode(sha256(inline[0].encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy
    assert "<style" not in page
    assert not re.findall(r"(?:https?:)?//[a-z]", page)
    assert all(not url.startswith("/") for url in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_the_path_of_the_files_changes_with_any_of_them(tmp_path: Path) -> None:
    folder = copied(tmp_path / "web")
    before = bytes(WebConsole(folder).page().body)
    assert bytes(WebConsole(folder).page().body) == before
    (folder / "vendor" / "pico.css").write_text("a{}")
    assert bytes(WebConsole(folder).page().body) != before


def test_without_its_libraries_there_is_no_console(tmp_path: Path) -> None:
    folder = copied(tmp_path / "web")
    (folder / "vendor" / "preact.mjs").unlink()
    assert not WebConsole(folder).available


def test_the_sources_name_no_other_host() -> None:
    for path in FOLDER.glob("*.*"):
        found = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path


def test_text_of_clients_is_never_inserted_as_markup() -> None:
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function")
    for path in FOLDER.glob("*.*"):
        assert markup.findall(path.read_text(encoding="utf-8")) == [], path


def test_the_pins_have_a_hash_and_no_address_for_each_library() -> None:
    text = (console_libraries.PINS / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in text
    packages = {source.rpartition("/dist")[0].split("/hooks")[0] for source in console_libraries.FILES.values()} - {""}
    assert {"preact", "htm", "uplot", "@dagrejs/dagre"} <= packages
    assert text.count('"integrity": "sha512-') == 6


async def test_files_are_kept_for_ever_and_unknown_ones_are_missing(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        web = WebConsole()
        status, headers, _ = await ask(ready.http, "/assets/x/main.js")
        assert status == (200 if web.available else 404)
        if web.available:
            assert "immutable" in headers["cache-control"]
            assert headers["content-type"].startswith("text/javascript")
        for path in ("/assets/x/missing.js", "/assets/x/index.html", "/assets/x/../../../__init__.py"):
            assert (await ask(ready.http, path))[0] == 404

"""`penstock kv` against a real store: deletes by value, locks around commands, export and import."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import kv as kv_transfer
from penstock.errors import UnavailableError
from penstock.node.node import Node
from penstock.pipelines.spec.values import run_key
from penstock.statestore.blocking import Client
from penstock.statestore.client.client import Condition, Expiry, StateStoreClient, Write
from penstock.testing import LocalNode
from tests.unit.cli.conftest import Command, Done
from tests.unit.node.test_node import config


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalNode]:
    with LocalNode(tmp_path / "node") as node:
        yield node


@pytest.fixture
def store(node: LocalNode) -> Client:
    return node.client("store")


@pytest.fixture
def kv(node: LocalNode, penstock: Command) -> Command:
    def run(name: str, *args: str, stdin: bytes | None = None) -> Done:
        return penstock("kv", name, "--broker", node.url, *args, stdin=stdin)

    return run


def test_vdel(kv: Command, store: Client) -> None:
    store.set("k", b"\x00v")
    done = kv("vdel", "k", "other")
    assert (done.status, done.err) == (1, "penstock: key 'k' was not deleted\n  why: it has another value\n")
    assert json.loads(kv("vdel", "k", "other", "--json").out) == {"key": "k", "deleted": -1}
    assert kv("vdel", "k", stdin=b"\x00v") == (0, "", "")
    assert kv("vdel", "k", "v") == (1, "", "penstock: key 'k' does not exist\n")


def _commits(http: str) -> float:
    text = urllib.request.urlopen(f"http://{http}/metrics", timeout=10).read().decode()
    return float(re.findall(r"^penstock_mqtt_storage_commits_total (\S+)", text, re.MULTILINE)[0])


def test_commands_of_one_request_commit_no_session(tmp_path: Path, penstock: Command) -> None:
    async def run() -> None:
        node = Node(config(tmp_path))
        ready = await node.start()
        try:
            for line in (
                ["set", "line-3/limit", "42"], ["get", "line-3/limit"], ["scan"], ["watch", "no", "--timeout", "0.1s"],
            ):  # fmt: skip
                done = await asyncio.to_thread(penstock, "kv", *line, "--broker", f"mqtt://{ready.mqtt}")
                assert done.status == 0, done.err
            assert await asyncio.to_thread(_commits, ready.http) == 0
            done = await asyncio.to_thread(penstock, "kv", "export", "--broker", f"mqtt://{ready.mqtt}")
            assert done.status == 0, done.err
            assert await asyncio.to_thread(_commits, ready.http) >= 2  # it has a session, since it may take long
        finally:
            await node.close()

    asyncio.run(run())


async def _losing_an_answer(node: LocalNode, run: Callable[[str], Done]) -> Done:
    """Run a command whose first connection ends at the answer to its request, which is not delivered."""
    host, _, port = node.url.removeprefix("mqtt://").partition(":")
    ended: list[asyncio.Event] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: bytes | None) -> None:
        with suppress(OSError):
            while (data := await reader.read(65_536)) and (last is None or last not in data):
                writer.write(data)
        writer.transport.abort()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last = None if ended else b"__stat"
        ended.append(asyncio.Event())
        end = ended[-1]
        from_node, to_node = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, to_node, None), copy(from_node, writer, last))
        end.set()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    done = await asyncio.to_thread(run, f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    for end in ended:
        await end.wait()
    assert len(ended) == 2
    return done


@pytest.mark.parametrize("line", [["set", "k", "v", "--nx"], ["del", "k"], ["vdel", "k", "v"]], ids=" ".join)
def test_a_command_whose_first_answer_is_lost_reports_what_it_did(
    node: LocalNode, store: Client, penstock: Command, line: list[str]
) -> None:
    """The request is sent again, after the first one was executed."""
    if line[0] != "set":
        store.set("k", "v")
    done = asyncio.run(_losing_an_answer(node, lambda url: penstock("kv", *line, "--broker", url)))
    assert (done.status, done.err) == (0, "")
    assert (store.get("k") is None) == (line[0] != "set")


def test_a_write_without_a_session_is_not_executed_twice(node: LocalNode, store: Client, penstock: Command) -> None:
    """Its answer is lost, and the store cannot recognize a repeated request without a session."""
    done = asyncio.run(_losing_an_answer(node, lambda url: penstock("kv", "set", "k", "v", "--broker", url)))
    assert (done.status, done.out) == (1, "")
    assert "whether SET 'k' was executed is unknown" in done.err
    assert "the broker has no session in which it would keep the answer" in done.err
    entry = store.get("k")
    assert entry is not None
    assert entry.value == b"v"


def test_a_read_without_a_session_is_repeated(node: LocalNode, store: Client, penstock: Command) -> None:
    store.set("k", "v")
    done = asyncio.run(_losing_an_answer(node, lambda url: penstock("kv", "get", "k", "--broker", url)))
    assert (done.status, done.out, done.err) == (0, "v", "")


@pytest.mark.parametrize("command", ["set", "delete", "vdelete"])
def test_a_client_without_a_session_does_not_report_the_answer_of_a_second_execution(
    node: LocalNode, store: Client, command: str
) -> None:
    """SET NX would report that the key exists, a deletion that it does not: of what its own first request did."""
    if command != "set":
        store.set("k", "v")

    async def work(url: str) -> Done:
        async with StateStoreClient.connect(url, session_expiry_s=0) as client:
            if command == "set":
                await client.set("k", "v", condition=Condition.NX)
            elif command == "delete":
                await client.delete("k")
            else:
                await client.vdelete("k", "v")
        raise AssertionError("the lost answer was not noticed")

    def run(url: str) -> Done:
        with pytest.raises(UnavailableError, match="was executed is unknown") as raised:
            asyncio.run(work(url))
        assert raised.value.applied is None
        return Done(0, "", "")

    asyncio.run(_losing_an_answer(node, run))
    assert (store.get("k") is None) == (command != "set")


def test_keys_and_contexts_are_offered_by_shell_completion(
    node: LocalNode, store: Client, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offered(line: str) -> list[str]:
        monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        done = penstock()
        monkeypatch.delenv("_PENSTOCK_COMPLETE")
        assert (done.status, done.err) == (0, "")
        return done.out.split()

    for key in (b"line-3/a", b"line-3/b", b"line-3/\xff", b"line*", b"other"):
        store.set(key, "v")
    assert offered(f"penstock kv get --broker {node.url} line-3/") == ["line-3/a", "line-3/b"]
    assert offered(f"penstock kv del --broker {node.url} line*") == [r"line\*"]  # Bash would look for files
    assert offered(f"penstock kv lock --broker {node.url} line-3/") == ["line-3/a", "line-3/b"]
    assert offered(f"penstock kv scan --broker {node.url} l") == [r"line-3/\*", r"line\[\*\]"]
    assert offered(f"penstock kv export --broker {node.url} line-3/") == ["line-3/a", "line-3/b"]
    assert offered("penstock kv get --broker 127.0.0.1:1 l") == []
    penstock("context", "add", "lab", "--broker", node.url)
    assert offered("penstock kv get o") == ["other"]  # at the address of the context
    assert offered("penstock context use l") == offered("penstock --context l") == ["lab"]
    for name in ("water", "wind", "heat"):
        store.set(run_key(name), "{}")
    assert offered(f"penstock pipeline stop --broker {node.url} w") == ["water", "wind"]
    monkeypatch.setenv("PENSTOCK_BROKER", node.url)
    assert offered("penstock pipeline stop h") == ["heat"]
    assert offered("penstock pipeline stop *") == []


def test_scan(kv: Command, store: Client) -> None:
    for key in (b"a/1", b"a/2", b"b\n", b"\xff"):
        store.set(key, "v")
    assert sorted(kv("scan").out.splitlines()) == ["\\xff", "a/1", "a/2", "b\\n"]
    done = kv("scan", "a/[!1]", "--json")
    assert (done.status, json.loads(done.out)) == (0, {"key": "a/2"})
    assert kv("scan", "none") == (1, "", "penstock: no key matches 'none'\n")
    done = kv("scan", "a/[1", "--json")
    assert (done.status, done.out) == (1, "")
    assert done.err == "penstock: no key matches 'a/[1'\n  why: '[' without ']' is a literal character\n"
    assert kv("scan", "").status == 2
    assert kv("scan", "--null", "--json").status == 2


def test_a_limited_scan_says_that_more_keys_match(kv: Command, store: Client) -> None:
    for key in (b"a/1", b"a/2", b"a/3"):
        store.set(key, "v")
    done = kv("scan", "a/*", "--limit", "2")
    assert (done.status, len(done.out.splitlines())) == (0, 2)
    assert done.err == "penstock: more keys match 'a/*' than the 2 shown: raise --limit or omit it\n"
    done = kv("scan", "a/*", "--limit", "3")
    assert (done.status, len(done.out.splitlines()), done.err) == (0, 3, "")
    assert kv("scan", "none", "--limit", "1").status == 1
    assert kv("scan", "--limit", "0").status == 2


def test_an_extension_that_the_store_does_not_offer_is_named(kv: Command) -> None:
    done = kv("watch", "--prefix", "plant/")
    assert done.status == 1
    assert "statestore.extensions: [prefix-observe]" in done.err


def test_watch_ends_at_its_timeout(kv: Command) -> None:
    done = kv("watch", "quiet", "--count", "1", "--timeout", "50ms")
    assert (done.status, done.out) == (1, "")
    assert done.err.endswith("penstock: 0 of 1 changes within 0.05 s\n")
    assert kv("watch", "quiet", "--timeout", "50ms").status == 0


def test_a_broker_is_named_by_host_and_port(node: LocalNode, penstock: Command) -> None:
    assert penstock("kv", "set", "--broker", node.url.removeprefix("mqtt://"), "k", "v").status == 0


def test_a_prefix_is_watched_and_fenced(penstock: Command, tmp_path: Path) -> None:
    with LocalNode(tmp_path, extensions=["prefix-observe", "prefix-fence"]) as node:
        store = node.client()
        held = store.set("lock", "me").version
        args = ("--broker", node.url, "--fencing-token", str(held))
        assert penstock("kv", "set", "out/started", "1", *args, "--fence-prefix", "out/").status == 0
        done = penstock("kv", "set", "out/new", "1", "--broker", node.url)
        assert (done.status, "a fencing token is required" in done.err) == (1, True)

        def change() -> None:
            while not node.observations:
                time.sleep(0.01)
            store.set("line/1", "a\n")
            store.delete("line/1")

        changing = threading.Thread(target=change)
        changing.start()
        done = penstock("kv", "watch", "--broker", node.url, "line/", "--prefix", "--count", "2")
        changing.join()
        lines = [line.split() for line in done.out.splitlines()]
        assert [(line[0], *line[2:]) for line in lines] == [("SET", "line/1", "a\\n"), ("DELETE", "line/1")]


# lock


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return ["--", sys.executable, str(path)]


def test_a_command_runs_under_the_lock_and_finds_its_token(
    kv: Command, store: Client, node: LocalNode, tmp_path: Path
) -> None:
    text = """
import os, sys
from penstock.statestore.blocking import Client
from penstock.statestore.hlc import parse
with Client(os.environ["PENSTOCK_BROKER"]) as store:
    held = store.get(os.environ["PENSTOCK_LOCK"])
    assert held.version >= parse(os.environ["PENSTOCK_FENCING_TOKEN"])  # later once the lock was renewed
    store.set("output", held.value, fencing_token=parse(os.environ["PENSTOCK_FENCING_TOKEN"]))
sys.exit(7)
"""
    assert kv("lock", "--holder", "me", "job", *program(tmp_path, text)).status == 7
    written = store.get("output")
    assert written is not None
    assert written.value == b"me"
    assert store.get("job") is None


def test_the_error_of_a_held_lock_names_its_holder(kv: Command, store: Client) -> None:
    store.set("job", "somebody", ttl_ms=60_000)
    done = kv("lock", "--no-wait", "-E", "9", "job", "--", "true")
    assert done.status == 9
    assert done.err.startswith("penstock: lock 'job' was not acquired\n  why: 'somebody' holds it;")
    done = kv("lock", "--wait", "0.05", "job", "--", "true")
    assert (done.status, "within 0.05 s" in done.err) == (1, True)
    store.delete("job")
    assert kv("lock", "--no-wait", "job", "--", "true") == (0, "", "")


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["job", "--", "/nonexistent/command"], 127, "/nonexistent/command: No such file"),
        (["job", "--", "/etc"], 126, "/etc: Permission denied"),
        (["job", "--"], 2, "Missing argument"),
        (["job", "echo", "--wrong"], 2, "No such option"),
        (["job", "--no-wait", "--", "sh", "-c", "exit 4"], 4, ""),
        (["--no-wait", "--wait", "1", "job", "--", "true"], 2, "exclude each other"),
        (["job", "--", "sh", "-c", "kill -TERM $$"], 143, ""),
    ],
)
def test_statuses_are_those_of_a_shell(kv: Command, args: list[str], status: int, message: str) -> None:
    done = kv("lock", *args)
    assert done.status == status, done.err
    assert message in done.err


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_command_is_ended_when_the_lock_is_lost(kv: Command, store: Client, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def steal() -> None:
        wait_for(ready)
        store.set("job", "thief")

    thief = threading.Thread(target=steal)
    thief.start()
    done = kv("lock", "--ttl", "9s", "job", *program(tmp_path, WAITS), str(ready))
    thief.join()
    assert done.status == 1
    assert "the lock was lost, ending the command" in done.err
    assert "penstock: lock 'job' was lost while it was in use\n  why: another client holds it" in done.err


def test_signals_reach_the_command_and_the_lock_is_released(node: LocalNode, store: Client, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [
        sys.executable,
        "-c",
        "from penstock.cli.main import main; raise SystemExit(main())",
        "kv",
        "lock",
        "job",
    ]
    process = subprocess.Popen(
        [*command, *program(tmp_path, WAITS), str(ready)], env=os.environ | {"PENSTOCK_BROKER": node.url}
    )
    wait_for(ready)
    assert store.get("job") is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5
    assert store.get("job") is None


# export and import


def test_export_and_import_are_inverse(kv: Command, store: Client, tmp_path: Path) -> None:
    entries = {b"text": b"v", "ä\n".encode(): "ö".encode(), b"\xff\x00": b"\xfe", b"empty": b""}
    for key, value in entries.items():
        store.set(key, value)
    keys, file = tmp_path / "keys", tmp_path / "file"
    keys.write_bytes(b"text\nempty\nnone\n")
    done = kv("export", "--keys", str(keys))
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["key"], row["value"]) for row in rows] == [("text", "v"), ("empty", "")]
    version = store.get("text")
    assert version is not None
    assert rows[0]["version"] == str(version.version)
    file.write_text(
        '{"key": "text", "value": "v"}\n\n{"key_base64": "/wA=", "value_base64": "/g==", "version": "x"}\n'
        '{"key": "short", "value": "1", "ttl_ms": 60000}\n{"key": "text", "value": "later"}\n'
    )
    store.delete(b"\xff\x00")
    assert kv("import", str(file)).err == "imported 3 keys\n"
    assert [(store.get(key) or (None,))[0] for key in (b"text", b"\xff\x00")] == [b"later", b"\xfe"]
    done = kv("import", "--nx", "--json", stdin=b'{"key": "text", "value": "x"}\n{"key": "new", "value": "x"}\n')
    assert json.loads(done.out) == {"imported": 1, "skipped": 1}
    exported = [json.loads(line) for line in kv("export", "[!t]*").out.splitlines()]
    assert {row.get("key", row.get("key_base64")) for row in exported} == {"ä\n", "empty", "short", "new", "/wA="}
    told = kv("export", "--keys", str(keys), "--file", str(tmp_path / "out")).err.splitlines()
    assert [line.partition(":")[0] for line in told[:1]] == ["note"], "the store has no extension ttl"
    assert "imported keys never expire" in told[0]
    assert told[1].startswith("exported 2 keys to ")
    assert len((tmp_path / "out").read_text().splitlines()) == 2
    listed = kv("export", "--keys", "-", "--file", "-", stdin=b"text\n")
    assert json.loads(listed.out)["key"] == "text"
    assert kv("import", "-", stdin=listed.out.encode()).err == "imported 1 key\n"


def test_an_export_leaves_out_a_key_that_expires_while_it_is_read(
    kv: Command, store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expiry(_: StateStoreClient, key: bytes | str) -> Expiry:
        return Expiry(exists=key != b"lock", left_ms=None)

    store.set("lock", "holder")
    store.set("limit", "42")
    monkeypatch.setattr(StateStoreClient, "expiry", expiry)
    assert [json.loads(line)["key"] for line in kv("export").out.splitlines()] == ["limit"]


def test_an_exported_value_has_its_own_time_to_live(
    kv: Command, store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is set while it is read is exported as before or as after it."""
    changes = iter(["second", "third"])

    async def expiry(client: StateStoreClient, key: bytes | str) -> Expiry:
        if key == b"limit" and (value := next(changes, None)):
            await client.set(key, value)
        return Expiry(exists=True, left_ms=60_000 if (await client.get("limit") or [b"first"])[0] != b"first" else None)

    store.set("limit", "first")
    monkeypatch.setattr(StateStoreClient, "expiry", expiry)
    row = json.loads(kv("export").out)
    assert (row["value"], "ttl_ms" in row) in [("first", False), ("second", True), ("third", True)]


def test_an_export_that_the_disk_has_no_space_for_leaves_the_earlier_one(
    kv: Command, store: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file, link = tmp_path / "keys.jsonl", tmp_path / "link"
    file.write_text("earlier\n")
    link.symlink_to(file)
    store.set("limit", "42")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert kv("export", "--file", str(link)).status == 1
    assert file.read_text() == "earlier\n"
    assert kv("export", "--file", str(link)).status == 0
    assert (json.loads(file.read_text())["value"], link.is_symlink()) == ("42", True)
    assert [path.name for path in tmp_path.glob("*.new")] == []


def test_an_export_that_fails_leaves_the_earlier_one(
    kv: Command, store: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(_: StateStoreClient, key: bytes) -> None:
        raise UnavailableError(f"no answer for {key!r}")

    file = tmp_path / "keys.jsonl"
    file.write_text("earlier\n" * 100)
    file.chmod(0o600)
    store.set("limit", "42")
    with monkeypatch.context() as patched:
        patched.setattr(StateStoreClient, "get", get)
        assert kv("export", "--file", str(file)).status == 1
    assert file.read_text() == "earlier\n" * 100
    assert kv("export", "--file", str(file)).status == 0
    assert (json.loads(file.read_text())["value"], file.stat().st_mode & 0o777) == ("42", 0o600)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "it is not JSON: expecting property name"),
        (b"[]", "it is JSON, but not an object"),
        (b'{"value": "v"}', "it has neither 'key' nor 'key_base64'"),
        (b'{"key": "k", "key_base64": "aw==", "value": "v"}', "it has both 'key' and 'key_base64'"),
        (b'{"key": "", "value": "v"}', "the key is empty"),
        (b'{"key": 1, "value": "v"}', "key is 1, expected text"),
        (b'{"key": "k", "value_base64": "?"}', "value_base64 is not base64"),
        (b'{"key": "k", "value": "v", "ttl_ms": 0}', "ttl_ms is 0, expected"),
        (b'{"key": "k", "value": "v", "ttl_ms": true}', "ttl_ms is True, expected"),
        (b'{"key": "\xff"}', "it is not UTF-8 text"),
    ],
)
def test_nothing_is_imported_if_one_line_is_invalid(kv: Command, node: LocalNode, line: bytes, why: str) -> None:
    done = kv("import", stdin=b'{"key": "first", "value": "v"}\n' + line + b"\n")
    assert done.status == 2
    first, cause, action = done.err.splitlines()
    assert first.startswith("penstock: kv import: line 2 cannot be used: ")
    assert why in cause
    assert '{"key": "line-3/target", "value": "12.5"}' in action
    assert node.keys == 0


def test_a_refused_import_reports_its_progress(kv: Command, store: Client) -> None:
    fenced = store.set("lock", "me").version
    store.set("fenced", "v", fencing_token=fenced)
    done = kv("import", stdin=b'{"key": "a", "value": "v"}\n{"key": "fenced", "value": "v"}\n')
    assert done.status == 1
    assert done.err.startswith("imported 1 key before this error\npenstock: state store refused SET 'fenced'")


def test_an_unanswered_import_reports_its_progress(kv: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_many = StateStoreClient.write_many

    async def once(self: StateStoreClient, writes: Iterable[Write], **options: Any) -> list[bool]:
        wanted = list(writes)
        if wanted[0].key == b"b":
            raise UnavailableError("no answer")
        return await write_many(self, wanted, **options)

    monkeypatch.setattr(kv_transfer, "LINES_AT_ONCE", 1)
    monkeypatch.setattr(StateStoreClient, "write_many", once)
    done = kv("import", stdin=b'{"key": "a", "value": "v"}\n{"key": "b", "value": "v"}\n')
    assert done.status != 0
    assert done.err.startswith("imported at least 1 keys before this error\npenstock: no answer")

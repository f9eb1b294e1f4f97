"""Live messages, publish, retained messages and changes of keys in the console: with the permissions of the user."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cbor2
import pytest

from penstock.console.payload_schemas import NO_SCHEMAS
from penstock.console.statestore import StateStoreViews
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.node import console_clients
from penstock.node.config.mqtt import Security
from penstock.runtime.io.network import parse_address
from penstock.runtime.observability.audit import read_audit
from penstock.security.passwords import edit_passwords, make_credential
from penstock.statestore.binding import INVOKE
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.observations import KeyChange
from penstock.statestore.engine.record import Record
from penstock.statestore.hlc import Hlc
from tests.unit.node.test_api import Api, mqtt
from tests.unit.node.test_http_access import basic, running, users
from tests.unit.node.test_node import config

POLICIES = """
rules:
  - principals: {usernames: [oscar]}
    brokerResources:
      - {method: Publish, topics: ["plant/#", "statestore/#"]}
      - {method: Subscribe, topics: ["plant/#", "clients/+/#"]}
    stateStoreResources: [{method: ReadWrite, keys: ["plant/*"]}]
"""


class Live:
    """A live subscription over HTTP."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.dropped = self.filtered = 0

    async def rows(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                line = await self._reader.readline()
                assert line, "the stream ended"
                if line.startswith(b"{"):
                    part = json.loads(line)
                    found += part["rows"]
                    self.dropped += part["dropped"]
                    self.filtered += part.get("filtered", 0)
        return found

    async def end(self) -> None:
        """Wait for the end of the response; it has no more rows."""
        async with asyncio.timeout(60):
            while (line := await self._reader.readline()) != b"0\r\n":  # the last chunk
                assert line, "the connection was cut"
                assert not line.startswith(b"{") or not json.loads(line)["rows"]


@asynccontextmanager
async def live(api: Api, query: str, path: str = "messages") -> AsyncIterator[Live]:
    reader, writer = await asyncio.open_connection(*parse_address(api.ready.http))
    head = f"GET /api/v1/{path}?{query} HTTP/1.1\r\nHost: {api.ready.http}\r\nAuthorization: {api.authorization}\r\n"
    writer.write((head + "\r\n").encode())
    head_lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).splitlines()
    assert head_lines[0].startswith(b"HTTP/1.1 200")
    assert b"x-accel-buffering: no" in head_lines  # a proxy passes each line on at once
    try:
        yield Live(reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_live_messages_are_decoded_filtered_and_end_with_the_connection(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with mqtt(ready, "device") as client, live(api, "filter=plant/%23&q=press") as found:
            await client.publish("plant/a", "temperature 1")
            await client.publish(
                "plant/press",
                cbor2.dumps({"bar": 4.5}),
                properties=Properties(
                    content_type="application/cbor",
                    response_topic="answers",
                    correlation_data=b"\x01",
                    user_properties=[("unit", "bar"), ("unit", "psi")],
                ),
            )
            (row,) = await found.rows(1)
            assert (row["topic"], row["format"], json.loads(row["value"])) == ("plant/press", "cbor", {"bar": 4.5})
            assert (row["content_type"], row["response_topic"]) == ("application/cbor", "answers")
            assert [each["value"] for each in row["user_properties"]] == ["bar", "psi"]
            assert found.filtered == 1
            assert any(row["client_id"].startswith("console-") for row in (await api.get("/clients"))["rows"])
        await api.until("/clients", lambda now: not any(row["client_id"].startswith("console-") for row in now["rows"]))
        status, _, body = await api.send("/messages?filter=a%23")
        assert (status, body["error"]["code"]) == (400, "bad_parameter")
        (entry,) = read_audit(tmp_path / "audit")
        assert (entry["method"], entry["parameters"]) == ("subscribe", {"filter": "plant/#", "q": "press"})


async def test_topics_are_counted_only_while_somebody_looks(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with mqtt(ready, "device") as client:
            await client.publish("plant/a", "kept", retain=True)
            async with live(api, "filter=plant/%23", "topic-tree") as found:
                for number in range(5):
                    await client.publish("plant/b", str(number))
                totals: dict[str, int] = {}
                last: dict[str, Any] = {}
                while sum(totals.values()) < 6:
                    for row in await found.rows(1):
                        topic = row["last"]["topic"]
                        totals[topic] = totals.get(topic, 0) + row["messages"]
                        last[topic] = row["last"]
                assert totals == {"plant/a": 1, "plant/b": 5}
                assert (last["plant/a"]["retain"], last["plant/b"]["value"], last["plant/b"]["retain"]) == (
                    True,
                    "4",
                    False,
                )
                seen = (await api.get("/subscriptions"))["rows"]
                assert [row["filter"] for row in seen if row["client_id"].startswith("console-")] == ["plant/#"]
            await api.until("/subscriptions", lambda now: not now["rows"])
        (entry,) = read_audit(tmp_path / "audit")
        assert (entry["method"], entry["parameters"]) == ("subscribe", {"filter": "plant/#", "topics": True})
        assert (await api.send("/topic-tree?filter=a%23"))[0] == 400
        assert (await Api(ready, "").send("/topic-tree"))[0] == 401


def test_counts_of_topics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_clients, "MAX_TOPICS", 3)
    counts = console_clients._TopicCounts(NO_SCHEMAS)
    for number in range(20):
        for _ in range(2):
            counts.receive(Publish(f"many/{number}", b"x" * (100_000 if number == 2 else 600)))
    line = json.loads(counts.next_line())
    assert [(row["last"]["topic"], row["messages"], row["bytes"]) for row in line["rows"]] == [
        ("many/0", 2, 1200),
        ("many/1", 2, 1200),
        ("many/2", 2, 200_000),
    ]
    for row, size in (0, 600), (2, 100_000):
        last = line["rows"][row]["last"]
        assert (last["truncated"], last["value"], last["bytes"]) == (True, "x" * 512, size)
    assert line["dropped"] == 34
    assert json.loads(counts.next_line())["rows"] == []


def test_the_time_for_payloads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = console_clients._Messages("", NO_SCHEMAS)
    monkeypatch.setattr("penstock.node.console_clients.time.thread_time", iter(range(100)).__next__)
    for _ in range(2):  # a line begins anew
        for _ in range(3):
            messages.receive(Publish("a", b"1"))
        line = json.loads(messages.next_line())
        assert (len(line["rows"]), line["dropped"]) == (1, 2)


async def test_live_messages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_clients, "MAX_WAITING", 5)
    monkeypatch.setattr(console_clients, "MAX_STREAMS", 1)
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with mqtt(ready, "device") as client, live(api, "filter=%23") as found:
            for number in range(40):
                await client.publish("a", str(number), qos=0)
            await client.publish("b", b"")
            first = await found.rows(1)
            await client.publish("end", b"")
            rows = first
            while rows[-1]["topic"] != "end":
                rows += await found.rows(1)
            assert len(rows) + found.dropped == 42
            status, _, body = await api.send("/messages?filter=b")
            assert (status, body["error"]["code"]) == (503, "unavailable")
        await api.until("/clients", lambda now: not any(row["client_id"].startswith("console-") for row in now["rows"]))
        for _ in range(2):  # it has one format, and ends with its connection
            async with live(api, "filter=b&format=csv"):
                pass
            await api.until("/clients", lambda now: all(row["client_id"] == "device" for row in now["rows"]))


async def test_published_messages_have_the_properties_and_retained_ones_are_shown(tmp_path: Path) -> None:
    async with running(config(tmp_path, statestore={"extensions": ["as-of"]})) as ready:
        api = Api(ready)
        path = "/messages?topic=hall/a&qos=1&retain=1&content_type=text/plain&correlation=0aff&expiry_s=60&text=1"
        status, _, body = await api.send(f"{path}&user_property=unit%3Dbar&user_property=unit%3D", "POST", "hello")
        assert (status, body["topic"], body["bytes"], body["reason_code"]) == (200, "hall/a", 5, 0)
        found = await api.get("/retained/hall/a")
        assert (found["value"], found["format"]) == ("hello", "text")
        assert found["retain"]
        assert found["text_payload"]
        assert (found["correlation_base64"], found["content_type"]) == ("Cv8=", "text/plain")
        assert [(each["name"], each["value"]) for each in found["user_properties"]] == [("unit", "bar"), ("unit", "")]
        status, _, body = await api.send("/messages?topic=plant/%23", "POST", "x")
        assert (status, body["error"]["code"]) == (400, "bad_parameter")
        assert (await api.send("/messages?topic=a&correlation=x", "POST", "x"))[0] == 400
        assert (await api.send("/messages?topic=hall/a&retain=1", "POST"))[0] == 200  # clears it
        assert (await api.send("/retained/hall/a"))[0] == 404
        methods = [entry["method"] for entry in read_audit(tmp_path / "audit")]
        assert methods == ["publish", "read_retained", "publish"]


async def test_a_key_is_changed_only_if_it_has_the_version_that_was_shown(tmp_path: Path) -> None:
    async with running(config(tmp_path, statestore={"extensions": ["as-of"]})) as ready:
        api = Api(ready)
        assert (await api.send("/keys/plant/a", "PUT", "1"))[0] == 200  # a new key
        status, _, body = await api.send("/keys/plant/a", "PUT", "2")
        assert (status, body["error"]["code"]) == (409, "changed")
        shown = (await api.get("/keys/plant/a"))["version"]
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            await store.set("plant/a", "other")
        for method in ("PUT", "DELETE"):
            status, _, body = await api.send(f"/keys/plant/a?version={shown}", method, "3")
            assert (status, body["error"]["code"]) == (409, "changed"), method
        now = (await api.get("/keys/plant/a"))["version"]
        assert (await api.send(f"/keys/plant/a?version={now}&ttl_ms=60000", "PUT", "4"))[0] == 200
        found = await api.get("/keys/plant/a")
        assert (found["value"], found["expires_in_s"] is not None) == ("4", True)
        versions = await api.get("/key-versions/plant/a")
        assert ([row["value"] for row in versions["rows"]], versions["ends"]) == (["4", "other", "1"], "complete")
        assert (await api.send(f"/keys/plant/a?version={found['version']}", "DELETE"))[0] == 200
        assert (await api.send("/keys/plant/a"))[0] == 404
        assert (await api.send("/key-versions/plant/a"))[0] == 404
        methods = [entry["method"] for entry in read_audit(tmp_path / "audit")]
        assert [each for each in methods if each != "read_values"] == ["set_key", "set_key", "delete_key"]


async def test_a_key_that_is_not_text_has_an_address(tmp_path: Path) -> None:
    key, name = b"\xff/\x00", "base64:/y8A"
    async with (
        running(config(tmp_path, statestore={"extensions": ["as-of"]})) as ready,
        StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store,
    ):
        api = Api(ready)
        path = "/keys/%2Fy8A?encoding=base64"
        assert (await api.send(path, "PUT", "1"))[2]["key"] == name
        entry = await store.get(key)
        assert entry is not None
        shown = await api.get(path)
        assert (shown["key"], shown["value"], shown["version"]) == (None, "1", str(entry.version))
        assert len((await api.get("/key-versions/%2Fy8A?encoding=base64"))["rows"]) == 1
        async with live(api, "key=%2Fy8A&encoding=base64", "key-changes") as one:
            ((row,)) = await one.rows(1)
            assert (row["key_base64"], row["value"]) == ("/y8A", "1")
        assert (await api.send(f"{path}&version={entry.version}", "DELETE"))[2] == {"key": name, "deleted": True}
        assert await store.get(key) is None
        for wrong, what in (
            ("/keys/x?encoding=base64", "key 'x' is not base64"),
            ("/keys/x?encoding=hex", "encoding="),
        ):
            status, _, body = await api.send(wrong)
            assert (status, body["error"]["what"].startswith(what)) == (400, True)
        named = {entry["parameters"]["key"] for entry in read_audit(tmp_path / "audit")}
        assert named == {name}


async def test_changes_of_a_key_and_of_a_prefix_are_shown_as_they_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(config(tmp_path, statestore={"extensions": ["prefix-observe"]})) as ready:
        api = Api(ready)
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            await store.set("plant/a", '{"bar": 4}', ttl_ms=600_000)
            async with (
                live(api, "key=plant/a", "key-changes") as one,
                live(api, "prefix=plant/", "key-changes") as more,
            ):
                (entry,) = await one.rows(1)
                assert (entry["operation"], entry["value"], entry["format"]) == ("ENTRY", '{"bar": 4}', "json")
                assert 0 < entry["expires_in_s"] <= 600
                assert (entry["owner"], entry["fencing_token"]) == ("", None)
                await store.set("plant/b", cbor2.dumps({"bar": 1}))
                await store.set("other", "1")
                changed = await store.set("plant/a", "5", ttl_ms=600_000)
                found = await more.rows(2)
                rows_of_one = await one.rows(1)
                await store.delete("plant/b")
                found += await more.rows(1)
                # The clock of expiries is after that of the key: its deletion is one.
                monkeypatch.setattr(StateStoreViews, "steady", lambda _: 1 << 60)
                await store.delete("plant/a")
                found += await more.rows(1)
                rows_of_one += await one.rows(1)
                by_key = {key: [row for row in found if row["key"] == key] for key in ("plant/a", "plant/b")}
                assert [row["operation"] for row in by_key["plant/b"]] == ["SET", "DELETE"]
                assert (by_key["plant/b"][0]["format"], by_key["plant/b"][0]["value"]) == ("cbor", '{"bar": 1}')
                assert (by_key["plant/b"][1]["value"], by_key["plant/b"][1]["value_bytes"]) == (None, None)
                for rows in (by_key["plant/a"], rows_of_one):
                    assert [row["operation"] for row in rows] == ["SET", "EXPIRE"]
                    assert (rows[0]["version"], rows[0]["value"]) == (str(changed.version), "5")
        for query in ("", "?key=a&prefix=b"):
            assert (await api.send(f"/key-changes{query}"))[0] == 400
        entries = [entry["parameters"] for entry in read_audit(tmp_path / "audit") if entry["method"] == "watch_keys"]
        assert entries == [{"key": "plant/a"}, {"prefix": "plant/"}]


def test_changes_of_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_clients, "MAX_WAITING", 3)
    monkeypatch.setattr(console_clients, "MAX_EXPIRIES", 2)

    class Store:
        now = 0

        def record(self, key: bytes) -> Record:
            return Record(key, b"", Hlc(1, 0, "n"), Hlc(0, 7, "n"), 10, "user:ada")

        def steady(self) -> int:
            return self.now

    store = Store()
    changes = console_clients._KeyChanges(store)
    for key in (b"a", b"\xff", b"c", b"d"):  # the expiry of the first two is forgotten
        changes.receive(KeyChange(key, "SET", b"\xfe", Hlc(1, 0, "n")))
    line = json.loads(changes.next_line())
    assert [(row["key"], row["key_base64"], row["value_base64"]) for row in line["rows"]] == [
        ("a", "YQ==", "/g=="),
        (None, "/w==", "/g=="),
        ("c", "Yw==", "/g=="),
    ]
    assert line["dropped"] == 1
    assert {(row["expires_in_s"], row["fencing_token"], row["owner"]) for row in line["rows"]} == {
        (0.01, str(Hlc(0, 7, "n")), "user:ada")
    }
    changes.receive(KeyChange(b"c", "DELETE", None, None))
    store.now = 10
    for key in (b"a", b"d"):
        changes.receive(KeyChange(key, "DELETE", None, None))
    operations = [row["operation"] for row in json.loads(changes.next_line())["rows"]]
    assert operations == ["DELETE", "DELETE", "EXPIRE"]


def test_a_change_that_was_overtaken_has_no_facts_of_the_later_one() -> None:
    class Store:
        def record(self, key: bytes) -> Record:
            return Record(key, b"2", Hlc(2, 0, "n"), Hlc(0, 7, "n"), 10, "user:ada")

        def steady(self) -> int:
            return 10

    changes = console_clients._KeyChanges(Store())
    changes.receive(KeyChange(b"a", "SET", b"1", Hlc(1, 0, "n")))
    changes.receive(KeyChange(b"a", "DELETE", None, None))
    changes.receive(KeyChange(b"a", "SET", b"2", Hlc(2, 0, "n")))
    changes.receive(KeyChange(b"a", "DELETE", None, None))
    rows = json.loads(changes.next_line())["rows"]
    found = [(row["operation"], row["expires_in_s"], row["fencing_token"], row["owner"]) for row in rows]
    unknown = (None, None, None)
    assert found == [
        ("SET", *unknown), ("DELETE", *unknown), ("SET", 0, str(Hlc(0, 7, "n")), "user:ada"), ("EXPIRE", *unknown)
    ]  # fmt: skip


async def test_a_fenced_key_needs_its_token(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            lock = await store.set("lock", "x")
            await store.set("plant/a", "1", fencing_token=lock.version)
        version = (await api.get("/keys/plant/a"))["version"]
        status, _, body = await api.send(f"/keys/plant/a?version={version}", "PUT", "2")
        assert (status, body["error"]["code"]) == (403, "refused")
        assert (await api.send(f"/keys/plant/a?version={version}&fencing_token=x", "PUT", "2"))[0] == 400
        assert (await api.send(f"/keys/plant/a?version={version}&fencing_token={lock.version}", "PUT", "2"))[0] == 200


async def test_a_reload_ends_live_messages_and_changes_of_readers_whose_account_changed(tmp_path: Path) -> None:
    passwords = users(tmp_path, "gone", "renewed", "vera")
    readers = ["gone", "renewed", "vera"]
    security = Security(passwords=passwords, viewers=readers, administrators=["renewed"])
    async with running(config(tmp_path / "data", security=security)) as ready:
        gone, renewed, vera = (Api(ready, basic(name, f"password of {name}")) for name in readers)
        async with (
            live(gone, "filter=plant/%23") as messages,
            live(gone, "filter=plant/%23", "topic-tree") as topics,
            live(renewed, "key=a", "key-changes") as changes,
            live(Api(ready), "filter=plant/%23") as of_token,
            live(vera, "filter=plant/%23") as others,
            mqtt(ready, "device", username="vera", password="password of vera") as device,
        ):
            edit_passwords(
                passwords, lambda old: {"vera": old["vera"], "renewed": make_credential("renewed", b"another password")}
            )
            assert (await Api(ready).send("/reload", "POST"))[0] == 200
            await device.publish("plant/a", "1")
            for ended in (messages, topics, changes):
                await ended.end()
            for continuing in (of_token, others):
                assert [row["topic"] for row in await continuing.rows(1)] == ["plant/a"]
            assert (await gone.send("/messages?filter=plant/%23"))[0] == 401


async def test_live_messages_end_whose_reader_changed_while_they_were_opened() -> None:
    accounts = iter(["before the reload", "after it"])
    server = MqttServer()
    clients = console_clients.ConsoleClients(server, account=lambda _reader: next(accounts))
    subscription = await clients.subscribe("", "a", reader="vera")
    try:
        assert [line async for line in subscription.lines()] == []
    finally:
        await subscription.close()
        await server.close()


async def test_the_policies_of_the_user_apply(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text(POLICIES)
    security = Security(
        passwords=users(tmp_path, "oscar", "ada", "bob"),
        policies=tmp_path / "policies.yaml",
        viewers=["bob"],
        operators=["oscar"],
        administrators=["ada"],
    )
    async with running(config(tmp_path / "data", security=security)) as ready:
        oscar, ada = (Api(ready, basic(name, f"password of {name}")) for name in ("oscar", "ada"))
        assert (await oscar.send("/messages?topic=plant/a&retain=1", "POST", "x"))[0] == 200
        assert (await ada.send("/messages?topic=other&retain=1", "POST", "x"))[0] == 200
        for path, method in (
            ("/messages?topic=other", "POST"),
            ("/messages?filter=%23", "GET"),
            ("/retained/other", "GET"),
            ("/keys/other", "PUT"),
            ("/key-versions/other", "GET"),
            ("/key-changes?key=other", "GET"),
            ("/key-changes?prefix=other/", "GET"),
        ):
            assert (await oscar.send(path, method, "x" if method != "GET" else ""))[0] == 403, path
        async with live(oscar, "filter=plant/%23") as found:
            assert [row["topic"] for row in await found.rows(1)] == ["plant/a"]
        bob = Api(ready, basic("bob", "password of bob"))  # without any permission by the policies
        for path, topic in (
            ("/key-changes?key=plant/a", f"clients/{{clientIdHex}}/{INVOKE}/response"),
            ("/messages?filter=plant/a", "plant/a"),
        ):
            status, _, body = await bob.send(path)
            refused = f"mqtt: this node refused subscription to {topic!r}: 0x87 not authorized"
            assert (status, body["error"]["what"]) == (403, refused)
            assert "Subscribe on" in body["error"]["hint"]
        assert "console-" not in body["error"]["hint"]
        assert "narrower" not in body["error"]["hint"]
        for path in ("topic-tree", "messages"):
            _, _, body = await oscar.send(f"/{path}?filter=%23")
            assert body["error"]["hint"].startswith(
                "use a narrower topic filter that the policies permit to the user; or"
            )
        status, _, body = await oscar.send("/key-changes?prefix=plant/")
        assert (status, "statestore.extensions: [prefix-observe]" in body["error"]["hint"]) == (403, True)
        assert (await oscar.send("/keys/plant/a", "PUT", "1"))[0] == 200
        versions = await oscar.get("/key-versions/plant/a")
        assert ([row["value"] for row in versions["rows"]], versions["ends"]) == (["1"], "disabled")
        assert (await ada.get("/keys/plant/a"))["owner"] == "user:oscar"

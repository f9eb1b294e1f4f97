"""The HTTP API of the console: what it shows of a running node, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, StorageError
from penstock.mqtt.client import MqttClient
from penstock.node.config.mqtt import Security
from penstock.node.config.node import RuleSection, TopicSection, Tube
from penstock.node.health import NodeHealth
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.runtime.observability.audit import read_audit
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.unit.node.test_http_access import ask, basic, running, users
from tests.unit.node.test_node import config, token_of


class Api:
    """Requests to the API of a node, with its administration token unless another credential is given."""

    def __init__(self, ready: ReadyNode, authorization: str | None = None) -> None:
        self.ready = ready
        self.authorization = f"Bearer {token_of(Path(ready.data_dir))}" if authorization is None else authorization

    async def send(
        self, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        reader, writer = await asyncio.open_connection(*parse_address(self.ready.http))
        head = f"{method} /api/v1{path} HTTP/1.1\r\nHost: {self.ready.http}\r\nConnection: close\r\n"
        if self.authorization:
            head += f"Authorization: {self.authorization}\r\n"
        head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head += f"Content-Length: {len(body.encode())}\r\n" if body else ""
        writer.write((head + "\r\n" + body).encode())
        answer = (await asyncio.wait_for(reader.read(), 60)).decode()
        writer.close()
        await writer.wait_closed()
        first, _, body = answer.partition("\r\n\r\n")
        status, *lines = first.split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        kind = found.get("content-type", "")
        if found.get("transfer-encoding") == "chunked":
            body = "".join(body.split("\r\n")[1::2]) if kind == "application/x-ndjson" else body
        return int(status.split()[1]), found, json.loads(body) if kind == "application/json" else body or None

    async def get(self, path: str) -> Any:
        status, _, body = await self.send(path)
        assert status == 200, body
        return body

    async def until(self, path: str, reached: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(60):
            while not reached(found := await self.get(path)):
                await asyncio.sleep(0.02)
        return found


def mqtt(ready: ReadyNode, name: str, **more: Any) -> MqttClient:
    host, port = parse_address(ready.mqtt)
    return MqttClient(host, port, client_id=name, **more)


async def test_the_overview_shows_node_listeners_load_and_hops(tmp_path: Path) -> None:
    wanted = config(tmp_path, rules=[RuleSection(filter="plant/#", topic="water")])
    async with running(wanted) as ready:
        api = Api(ready, "")  # as queries, without credentials where there are no users
        found = await api.get("/overview")
        assert found["health"] == {"ready": True, "state": "ready", "reasons": []}
        assert found["node"]["data_dir"] == str(tmp_path)
        listeners = {each["name"]: each for each in found["listeners"]}
        assert listeners["mqtt"]["address"] == ready.mqtt
        assert listeners["tube-master"]["address"] == ready.tube_master
        assert set(listeners) == {"mqtt", "tube-master", "tube-broker", "http", "tube-broker-http"}
        assert found["load"]["memory_bytes"] > 1 << 20
        assert set(found["load"]["commit_s"]) == {"mqtt", "statestore", "tube"}
        hops = {hop["id"]: hop for hop in found["hops"]}
        assert {after for hop in hops.values() for after in hop["to"]} <= set(hops)
        async with mqtt(ready, "device") as client:
            for _ in range(5):
                await client.publish("plant/a", b"x")
        seen = await api.until("/overview", lambda now: now["hops"][2]["total"] == 5)
        assert {hop["id"]: hop["total"] for hop in seen["hops"]} == {
            "publishers": 5, "subscribers": 0, "rules": 5, "statestore": 0, "log": 5, "groups": 0,
        }  # fmt: skip
        history = await api.until("/history", lambda now: sum(now["series"]["mqtt_in"]) > 0)
        assert len(history["at"]) == len(history["series"]["mqtt_in"])
        assert history["at"] == sorted(history["at"])
        assert (await api.get(f"/history?since={history['at'][-1] + 60_000}"))["at"] == []
        (rule,) = (await api.get("/rules"))["rows"]
        assert (rule["filter"], rule["logged"], rule["waiting"]) == ("plant/#", 5, 0)


async def test_clients_are_listed_with_queues_limits_and_subscriptions(tmp_path: Path) -> None:
    wanted = config(tmp_path, mqtt={"bind": "127.0.0.1:0", "limits": {"max_queued_messages": 3}})
    async with running(wanted) as ready:
        api = Api(ready)
        async with mqtt(ready, "away", session_expiry_s=600) as client:
            await client.subscribe("a/#")
        async with mqtt(ready, "here", keep_alive_s=30) as client:
            await client.subscribe("$share/g/b/+")
            for _ in range(5):
                await client.publish("a/b", b"payload", retain=True)
            page = await api.until("/clients?sort=-queued&limit=1", lambda now: not now["rows"][0]["connected"])
            assert (page["total"], page["matched"]) == (2, 2)
            (away,) = page["rows"]
            assert (away["client_id"], away["queued"], away["limits"]) == ("away", 3, ["max_queued_messages"])
            assert away["persistent"]
            assert 0 < away["ends_in_s"] <= 600
            (here,) = (await api.get(f"/clients?sort=-queued&limit=1&after={page['next']}"))["rows"]
            assert (here["client_id"], here["protocol"], here["keep_alive_s"]) == ("here", "MQTT 5", 45)
            assert here["address"].startswith("127.0.0.1")
            assert [row["client_id"] for row in (await api.get("/clients?state=offline"))["rows"]] == ["away"]
            assert [row["client_id"] for row in (await api.get("/clients?state=limited"))["rows"]] == ["away"]
            assert [row["client_id"] for row in (await api.get("/clients?q=HER"))["rows"]] == ["here"]
            detail = await api.get("/clients/here")
            assert detail["subscriptions"] == [
                {"client_id": "here", "filter": "b/+", "qos": 1, "no_local": False, "retain_as_published": False,
                 "connected": True, "group": "g"},
            ]  # fmt: skip
            rows = (await api.get("/subscriptions"))["rows"]
            assert [(row["client_id"], row["filter"]) for row in rows] == [("here", "b/+"), ("away", "a/#")]
            (message,) = (await api.get("/retained?filter=a/%2B"))["rows"]
            assert (message["topic"], message["bytes"], message["qos"]) == ("a/b", 7, 1)
            assert (await api.get("/retained?filter=c"))["rows"] == []
        events = await api.until("/events", lambda now: any("max_queued_messages" in e["text"] for e in now["rows"]))
        assert events["number"] >= len(events["rows"])


async def test_a_client_is_disconnected_by_delete_alone_and_after_a_dry_run(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        client = mqtt(ready, "device/1", session_expiry_s=60)
        async with client:
            status, _, body = await api.send("/clients/device/1?dry_run=1", "DELETE")
            assert (status, body["disconnected"], body["dry_run"]) == (200, True, True)
            await api.until("/clients/device/1", lambda now: now["client"]["connected_s"] > 0.05)
            status, _, body = await api.send("/clients/device/1", "DELETE")
            assert (status, body["disconnected"], body["dry_run"]) == (200, True, False)
            # It connects again.
            before = body["client"]["connected_s"]
            await api.until("/clients/device/1", lambda now: (now["client"]["connected_s"] or 0) < before)
        assert (await api.send("/clients/nobody", "DELETE"))[0] == 404
        assert (await api.send("/clients", "DELETE"))[0] == 405
        (row,) = read_audit(tmp_path / "audit")
        assert (row["method"], row["parameters"]) == ("disconnect_client", {"client_id": "device/1"})


async def test_log_levels_change_at_run_time_and_are_audited(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        before = (await api.get("/log-levels"))["levels"]
        assert before.keys() >= {"all", "mqtt", "mqtt.bridge", "tube", "statestore"}
        try:
            status, _, body = await api.send("/log-levels/mqtt?level=debug", "PUT")
            assert (status, body["levels"]["mqtt"], body["levels"]["mqtt.bridge"]) == (200, "debug", "debug")
            assert body["levels"]["tube"] == before["tube"]
            assert logging.getLogger("penstock.mqtt").isEnabledFor(logging.DEBUG)
            for wrong in ("mqtt?level=loud", "mqtt", "nothing?level=debug", "all?level=inherit"):
                assert (await api.send(f"/log-levels/{wrong}", "PUT"))[0] == 400
        finally:
            status, _, body = await api.send("/log-levels/mqtt?level=inherit", "PUT")
        assert (status, body["levels"]) == (200, before)
        rows = [(row["method"], row["parameters"]) for row in read_audit(tmp_path / "audit")]
        assert rows == [("set_log_level", {"part": "mqtt", "level": level}) for level in ("debug", "inherit")]


async def test_keys_are_paged_by_prefix_and_values_are_audited(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            for number in range(25):
                await store.set(f"line/{number:02}", f"value {number}")
            await store.set("other", "x" * 5000, ttl_ms=60_000)
            await store.set(b"raw\xff", b"\xfe")
        found: list[str] = []
        after = ""
        for _ in range(10):
            page = await api.get(f"/keys?prefix=line/&limit=10{after}")
            found += [row["key"] for row in page["rows"]]
            assert all(row["value"] is None for row in page["rows"])
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert found == [f"line/{number:02}" for number in range(25)]
        assert page["total"] == 27
        assert [row["key"] for row in (await api.get("/keys?prefix=line/&q=7"))["rows"]] == ["line/07", "line/17"]
        assert list(read_audit(tmp_path / "audit")) == []
        (row,) = (await api.get("/keys?prefix=oth&values=1"))["rows"]
        assert (row["value_bytes"], len(row["value"]), row["truncated"]) == (5000, 4096, True)
        assert 0 < row["expires_in_s"] <= 60
        (row,) = (await api.get("/keys?prefix=raw&values=1"))["rows"]
        assert (row["key"], row["key_base64"], row["value_base64"]) == (None, "cmF3/w==", "/g==")
        whole = await api.get("/keys/other")
        assert (len(whole["value"]), whole["truncated"]) == (5000, False)
        assert (await api.send("/keys/missing"))[0] == 404
        assert [entry["method"] for entry in read_audit(tmp_path / "audit")] == ["read_values"] * 3


async def test_a_list_is_exported_as_it_is_filtered(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}", timeout_s=120) as store:
            await asyncio.gather(*(store.set(f"line/{number:04}", b"x") for number in range(2100)))
            await store.set("=1+1", b"x")
        _, headers, text = await api.send("/keys?prefix=line/&format=ndjson&limit=3")
        assert headers["content-type"] == "application/x-ndjson"
        assert "attachment" in headers["content-disposition"]
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["key"] for row in rows] == [f"line/{number:04}" for number in range(2100)]
        _, _, text = await api.send("/keys?prefix=%3D&format=csv")
        assert "key,key_base64,value_bytes" in text
        assert "'=1+1," in text
        for path in ("/keys?format=xml", "/overview?format=csv", "/keys/line%2F0001?format=csv"):
            assert (await api.send(path))[0] == 400


async def test_topics_and_groups_have_a_lag_in_records_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tube = Tube(topics={"water": TopicSection(partitions=3), "idle": TopicSection(partitions=1)})
    async with running(config(tmp_path, tube=tube)) as ready:
        api = Api(ready)
        async with Consumer(ready.tube_master, "lake", ["water"]) as consumer:
            async with Producer(ready.tube_master) as producer:
                for number in range(30):
                    await producer.send("water", Record(b"%d" % number))
            seen = 0
            async for _ in consumer:
                seen += 1
                if seen == 30:
                    break
            detail = await api.until("/groups/lake", lambda now: len(now["members"]) == 1)
            assert detail["members"][0]["partitions"] == 3
            hidden = await Api(ready, "").get("/groups/lake")
            assert hidden["members"][0]["member"] == "-"
            assert {row["member"] for row in hidden["partitions"]} <= {"-", None}
        await api.until("/groups/lake", lambda now: now["group"]["lag_records"] == 0)
        async with Producer(ready.tube_master) as producer:
            for number in range(12):
                await producer.send("water", Record(b"%d" % number))
        group = await api.until("/groups?sort=-lag_records", lambda now: now["rows"][0]["lag_records"] == 12)
        assert group["rows"][0]["lag_exact"]
        later = await api.until("/groups/lake", lambda now: now["group"]["lag_s"] > 0)
        assert later["group"]["state"] == "without members"
        parts = later["partitions"]
        assert sum(row["lag_records"] for row in parts) == 12  # of the store, which the partitions share, 12 as well
        topics = {row["topic"]: row for row in (await api.get("/topics"))["rows"]}
        assert (topics["water"]["groups"], topics["water"]["lag_records"], topics["idle"]["groups"]) == (1, 12, 0)
        (broker,) = (await api.get("/brokers"))["rows"]
        assert (broker["broker"], broker["address"], broker["state"]) == (1, ready.tube_broker, "running")
        assert (broker["accepts_records"], broker["accepts_consumers"], broker["topics"]) == (True, True, 2)
        assert (broker["http"], broker["tls_port"], broker["failure"]) == (ready.tube_broker_http, None, None)
        assert 0 <= broker["silent_s"] < 60
        metrics = (await ask(ready.http, "/metrics"))[2]
        assert 'penstock_group_lag_records{group="lake"} 12.0' in metrics
        assert 'penstock_group_members{group="lake"} 0.0' in metrics
        seconds = re.search(r'penstock_group_lag_seconds\{group="lake"\} (\S+)', metrics)
        assert seconds is not None
        assert float(seconds[1]) > 0
        await reset_offsets(api)
        water = await api.get("/topics/water")
        assert sum(part["records"] for part in water["partitions"]) == 42
        assert water["group_names"] == ["lake"]
        assert (await api.send("/topics/none"))[0] == 404
        assert (await api.send("/groups/none"))[0] == 404
        monkeypatch.setattr("penstock.console.tube.LAG_S", 60.0)
        await api.until("/groups", lambda now: now["total"] == 1)
        async with Consumer(ready.tube_master, "late", ["water"]) as consumer:
            async with Producer(ready.tube_master) as producer:
                await producer.send("water", Record(b"1"))
            async for _ in consumer:
                break
        status, _, plan = await api.send("/groups/late/reset?to=earliest&dry_run=1", "POST")
        assert (status, plan["partitions"]) == (200, 3)  # also of offsets that no lag was computed for


async def shift_offsets(api: Api, reset: str) -> None:
    """Preview shifts of the group `lake`, and exact offsets: in all partitions, one topic, and one partition."""
    rows = (await api.get("/groups/lake"))["partitions"]
    tube_parts = {row["partition"]: row for row in (await api.get("/topics/water"))["partitions"]}
    behind = {row["partition"]: row["lag_records"] for row in rows}
    read = {row["partition"]: tube_parts[row["partition"]]["records"] - row["lag_records"] for row in rows}
    for by, window in ((1, 5), (3, 1), (1000, 5), (3, 1 << 16)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.console.tube.SHIFT_RECORDS", window)
            (_, _, back), (_, _, ahead) = [
                await api.send(f"{reset}?to={sign}{by}&dry_run=1", "POST") for sign in ("-", "%2B")
            ]
            assert {m["partition"]: m["records"] for m in back["moves"]} == {p: min(by, n) for p, n in read.items()}
            assert {m["partition"]: -m["records"] for m in ahead["moves"]} == {p: min(by, n) for p, n in behind.items()}
    row = rows[0]
    only = f"topic=water&partition={row['partition']}&dry_run=1"
    (move,) = (await api.send(f"{reset}?to=offset:{row['end_offset']}&{only}", "POST"))[2]["moves"]
    assert (move["partition"], move["to_offset"]) == (row["partition"], row["end_offset"])
    assert move["records"] == -row["lag_records"]
    status, _, body = await api.send(f"{reset}?to=offset:1&{only}", "POST")
    assert (status, body["error"]["why"][:27]) == (400, "offsets are multiples of 28")
    assert (await api.send(f"{reset}?to=offset:28&dry_run=1", "POST"))[0] == 400
    assert (await api.send(f"{reset}?to=latest&topic=idle&dry_run=1", "POST"))[0] == 404


async def reset_offsets(api: Api) -> None:
    """Reset the group `lake`, which has read 30 of 42 records, with previews that change nothing."""
    reset = "/groups/lake/reset"
    for to, again, skipped in (("earliest", 30, 0), ("latest", 0, 12), ("0", 30, 0), (f"{1 << 42}", 0, 12)):
        status, _, plan = await api.send(f"{reset}?to={to}&dry_run=1", "POST")
        assert (status, plan["dry_run"], plan["read_again"], plan["skipped"]) == (200, True, again, skipped), to
        assert plan["exact"]
        assert sum(move["records"] for move in plan["moves"]) == again - skipped
    assert (await api.get("/groups/lake"))["group"]["lag_records"] == 12
    await shift_offsets(api, reset)
    status, _, done = await api.send(f"{reset}?to=earliest", "POST")
    assert (status, done["dry_run"], done["partitions"], done["read_again"]) == (200, False, 3, 30)
    assert (await api.get("/groups/lake"))["group"]["lag_records"] == 42
    preview = (await api.send(f"{reset}?to=%2B1&dry_run=1", "POST"))[2]
    for status in (200, 409):  # a repeated request does not shift again
        answer = await api.send(f"{reset}?to=%2B1&digest={preview['digest']}", "POST")
        assert answer[0] == status, answer
        assert (await api.get("/groups/lake"))["group"]["lag_records"] == 39
    assert answer[2]["error"]["what"] == "the offsets of group 'lake' changed meanwhile"
    assert (await api.send(f"{reset}?to=latest", "POST"))[2]["skipped"] == 39
    status, _, body = await api.send(f"{reset}?to=yesterday", "POST")
    assert (status, body["error"]["code"]) == (400, "bad_parameter")
    assert (await api.send("/groups/none/reset?to=latest", "POST"))[0] == 404
    assert (await api.send(f"{reset}?to=latest"))[0] == 404  # GET: a group of this name
    assert (await Api(api.ready, "").send(f"{reset}?to=latest", "POST"))[0] == 401
    rows = [row for row in read_audit(Path(api.ready.data_dir) / "audit") if row["method"] == "reset_offsets"]
    assert [row["parameters"]["to"] for row in rows] == ["earliest", "+1", "latest"]


async def test_groups_with_members_and_of_pipelines_are_not_reset(tmp_path: Path) -> None:
    tube = Tube(topics={"water": TopicSection(partitions=1)})
    async with running(config(tmp_path, tube=tube)) as ready:
        api = Api(ready)
        for group, why in (("lake", "has 1 member"), ("pipeline-x", "belongs to a pipeline")):
            async with Consumer(ready.tube_master, group, ["water"]) as consumer:
                async with Producer(ready.tube_master) as producer:
                    await producer.send("water", Record(b"1"))
                async for _ in consumer:
                    break
                await api.until(f"/groups/{group}", lambda now: bool(now["partitions"]))
                status, _, body = await api.send(f"/groups/{group}/reset?to=earliest&dry_run=1", "POST")
                assert (status, body["error"]["code"]) == (409, "refused")
                assert why in body["error"]["what"]


async def test_names_and_contents_need_an_administrator(tmp_path: Path) -> None:
    protected = ("/clients", "/clients/x", "/subscriptions", "/retained", "/keys", "/keys/x", "/events")
    async with running(config(tmp_path / "open")) as ready:
        for path in protected:
            status, headers, body = await Api(ready, "").send(path)
            assert (status, body["error"]["code"]) == (401, "unauthorized"), path
            assert headers["www-authenticate"].startswith("Bearer")
            assert body["error"]["hint"]
    security = Security(passwords=users(tmp_path, "ann", "bob"), administrators=["ann"])
    async with running(config(tmp_path / "users", security=security)) as ready:
        for path in ("/overview", *protected):
            assert (await Api(ready, "").send(path))[0] == 401, path
            assert (await Api(ready, basic("bob", "wrong")).send(path))[0] == 401, path
        bob, ann = Api(ready, basic("bob", "password of bob")), Api(ready, basic("ann", "password of ann"))
        assert (await bob.send("/overview"))[0] == 200
        assert (await bob.send("/clients"))[0] == 403
        assert (await bob.send("/clients/x", "DELETE"))[0] == 403
        assert (await ann.send("/clients"))[0] == 200


POLICIES = """
rules:
  - principals: {usernames: [viola, oscar]}
    stateStoreResources: [{method: Read, keys: ["plant/*"]}]
    tubeResources: [{method: Consume, topics: [water], groups: [console]}]
  - principals: {usernames: [device]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["#"]}, {method: Subscribe, topics: ["#"]}]
    stateStoreResources: [{method: ReadWrite, keys: ["*"]}]
"""


async def test_each_role_includes_the_lower_ones_and_policies_limit_contents(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text(POLICIES)
    names = ("viola", "oscar", "ada", "bob")
    security = Security(
        passwords=users(tmp_path, *names),
        policies=tmp_path / "policies.yaml",
        administrators=["ada"],
        operators=["oscar"],
        viewers=["viola"],
    )
    tube = Tube(topics={"water": TopicSection(partitions=1), "oil": TopicSection(partitions=1)})
    async with running(config(tmp_path / "data", security=security, tube=tube)) as ready:
        api = {name: Api(ready, basic(name, f"password of {name}")) for name in names}
        roles = [(await each.get("/session"))["role"] for each in api.values()]
        assert roles == ["viewer", "operator", "administrator", "none"]
        allowed = {
            ("/clients", "GET"): {"viola", "oscar", "ada"},
            ("/groups/lake/reset?to=latest", "POST"): {"oscar", "ada"},
            ("/clients/x", "DELETE"): {"oscar", "ada"},
            ("/audit", "GET"): {"ada"},
            ("/backup?rate=x", "POST"): {"ada"},
            ("/keys/plant%2Fa", "GET"): {"viola", "oscar", "ada"},
            ("/keys/other", "GET"): {"ada"},
            ("/topics/water/records", "GET"): {"viola", "oscar", "ada"},
            ("/topics/oil/records", "GET"): {"ada"},
        }
        for (path, method), wanted in allowed.items():
            found = {name for name in names if (await api[name].send(path, method))[0] not in {401, 403}}
            assert found == wanted, path
        _, _, body = await api["viola"].send("/clients/x", "DELETE")
        assert body["error"]["what"] == "user 'viola' is not an operator"
        assert "security.operators" in body["error"]["hint"]


async def test_values_that_a_user_may_not_read_are_left_out_of_lists(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text(POLICIES)
    security = Security(
        passwords=users(tmp_path, "viola", "device"), policies=tmp_path / "policies.yaml", viewers=["viola"]
    )
    async with running(config(tmp_path / "data", security=security)) as ready:
        url = f"mqtt://{ready.mqtt}"
        async with StateStoreClient.connect(url, username="device", password="password of device") as store:
            await store.set("plant/a", "1")
            await store.set("secret/a", "2")
        viola = Api(ready, basic("viola", "password of viola"))
        rows = (await viola.get("/keys?values=1"))["rows"]
        assert [(row["key"], row["value"]) for row in rows] == [("plant/a", "1"), ("secret/a", None)]


async def test_the_audit_trail_is_paged_and_filtered(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        for number in range(5):
            await api.send(f"/keys?values=1&prefix=line/{number}")
        page = await api.get("/audit?limit=2")
        assert [row["parameters"]["prefix"] for row in page["rows"]] == ["line/4", "line/3"]
        await api.send("/keys?values=1&prefix=other")  # a new entry does not move the pages
        page = await api.get(f"/audit?limit=2&after={page['next']}")
        assert [row["parameters"]["prefix"] for row in page["rows"]] == ["line/2", "line/1"]
        page = await api.get(f"/audit?limit=2&after={page['next']}")
        assert [row["parameters"]["prefix"] for row in page["rows"]] == ["line/0"]
        assert (page["next"], page["total"]) == (None, 6)
        _, _, text = await api.send("/audit?format=csv&q=line/3")
        assert '"{""prefix"": ""line/3""' in text
        found = await api.get("/audit?q=LINE/3")
        assert (len(found["rows"]), found["matched"], found["total"]) == (1, 1, 6)


@pytest.mark.parametrize("headers", [{"Sec_Fetch_Site": "cross-site"}, {"Origin": "http://evil.example"}])
async def test_requests_of_other_sites_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    async with running(config(tmp_path)) as ready:
        status, _, body = await Api(ready).send("/overview", **headers)
        assert (status, body["error"]["code"]) == (403, "cross_site")


@pytest.mark.parametrize(
    "path",
    ["/clients?limit=0", "/clients?limit=x", "/clients?sort=colour", "/clients?after=x", "/clients?state=odd",
     "/keys?after=x", "/keys?after=WyItIl0", "/retained?filter=a%23", "/events?level=odd", "/history?since=-1",
     f"/keys?prefix={'x' * 5000}"],
)  # fmt: skip
async def test_bad_parameters_are_named(tmp_path: Path, path: str) -> None:
    async with running(config(tmp_path)) as ready:
        status, _, body = await Api(ready).send(path)
        assert (status, body["error"]["code"]) == (400, "bad_parameter")
        assert body["error"]["hint"]


async def test_an_unchanged_response_is_not_sent_again(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        _, headers, _ = await api.send("/keys")
        status, _, body = await api.send("/keys", If_None_Match=headers["etag"])
        assert (status, body) == (304, None)


async def test_health_has_cause_action_and_time_of_each_reason(tmp_path: Path) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        failure = StorageError("the log cannot be written", why="input/output error")
        node.health.add_problem("tube", lambda: failure)
        node.health.add_warning("disk", "out_of_space", lambda: OutOfSpaceError("1 MB is left", hint="delete files"))
        health = await Api(ready, "").get("/health")
        assert (health["ready"], [reason["code"] for reason in health["reasons"]]) == (
            False,
            ["storage_failed", "out_of_space"],
        )
        problem, warning = health["reasons"]
        assert (problem["what"], problem["why"]) == ("the log cannot be written", "input/output error")
        assert "restart" in problem["hint"]
        assert (warning["what"], warning["hint"]) == ("1 MB is left", "delete files")
        assert problem["since_at"] > 0
        again = await Api(ready, "").get("/health")
        assert again == health
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OutOfSpaceError("a commit waits"), "out_of_space"),
        (OutOfDescriptorsError("a commit waits"), "out_of_descriptors"),
        (StorageError("a commit failed"), "storage_failed"),
    ],
)
def test_health_tells_which_resource_a_commit_waits_for(failure: StorageError, code: str) -> None:
    health = NodeHealth()
    health.state = "ready"
    health.add_problem("tube", lambda: failure)
    found = health.snapshot()
    assert (found.ready, [reason.code for reason in found.reasons]) == (False, [code])


async def test_requests_that_end_early_or_have_long_numbers_are_no_errors_of_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(config(tmp_path)) as ready:
        api = Api(ready)
        for places in (f"0/{'9' * 5000}", f"{'9' * 5000}/0", f"0/{'9' * 19}"):
            status, _, body = await api.send(f"/topics/water/records/{places}")
            assert (status, body["error"]["code"]) == (404, "not_found")
        _, writer = await asyncio.open_connection(*parse_address(ready.http))
        head = f"PUT /api/v1/keys/k HTTP/1.1\r\nHost: {ready.http}\r\nAuthorization: {api.authorization}\r\n"
        writer.write((head + "Content-Length: 1000\r\n\r\nincomplete").encode())
        assert (await api.send("/keys/k"))[0] == 404  # the node has read the beginning of the other request
        writer.close()
        await writer.wait_closed()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

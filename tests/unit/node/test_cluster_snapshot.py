"""The snapshot of a cluster: read from etcd, over HTTP, and what a standby answers instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.client import EtcdClient, EtcdStatus, EtcdUnavailableError
from penstock.cluster.commit import Head
from penstock.cluster.log import LogKeys, clock_key, leader_key
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.console.snapshots import ClusterSnapshot, EtcdSnapshot
from penstock.errors import ConfigError, PenstockError, RefusedError
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.settings import settings_checksums
from penstock.node.cluster.state import MOST_LAG, ActiveNode, members_of, read_cluster
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.mqtt import Security
from penstock.node.config.node import NodeConfig, load_config
from penstock.node.data_dir import running_node
from penstock.node.node import Node
from penstock.runtime.io.clock import boot_ms
from tests.ports import free_ports
from tests.unit.console.test_cluster import HEALTHY
from tests.unit.node.test_api import Api
from tests.unit.node.test_http_access import ask, basic, users
from tests.unit.node.test_node import config

SECTION = ClusterSection(name="plant", node="one", etcd=["127.0.0.1:1", "127.0.0.1:2"])


class Etcd:
    """What etcd has, instead of a client."""

    endpoints = tuple(SECTION.etcd)
    endpoint = SECTION.etcd[0]

    def __init__(self, values: dict[bytes, bytes], found: Sequence[EtcdStatus | PenstockError]) -> None:
        self._values = values
        self._found = list(found)

    def call(self, method: str, request: pb.RangeRequest, _response: object, **_: object) -> pb.RangeResponse:
        assert method == "KV/Range"
        end = request.range_end or request.key + b"\0"
        return pb.RangeResponse(
            kvs=[
                pb.KeyValue(key=key, value=value, mod_revision=7)
                for key, value in sorted(self._values.items())
                if request.key <= key < end
            ]
        )

    def statuses(self) -> list[EtcdStatus | PenstockError]:
        return self._found

    def close(self) -> None:
        """Do nothing."""


def report(node: str, applied: int | None, problem: str | None = None, *, loading: bool = False) -> tuple[bytes, bytes]:
    value = {
        "node": node, "version": "0.1", "mqtt": f"{node}:1883", "http": f"{node}:8080", "problem": problem,
        "applied": {} if applied is None else {"mqtt": applied}, "seen_ms": 50_000, "loading": loading,
    }  # fmt: skip
    return f"{SECTION.prefix}node/{node}".encode(), json.dumps(value).encode()


def etcd(*reports: tuple[bytes, bytes], active: str | None = "one") -> Etcd:
    prefix, commits = SECTION.prefix, MOST_LAG + 10
    values = dict(reports) | {
        LogKeys(prefix, "mqtt").head: Head(b"i" * 16, commits, 7).encode(),
        LogKeys(prefix, "tube-master").head: Head(b"i" * 16, 3, 7).encode(),  # left from a cluster with TubeMQ
        clock_key(prefix): b'{"time_ms": 62000}',
    }
    if active is not None:
        values[leader_key(prefix)] = json.dumps({"node": active}).encode()
    failure = EtcdUnavailableError(
        "etcd 127.0.0.1:2: no answer", why="connection refused", member_hint="check that it runs"
    )
    return Etcd(values, [EtcdStatus("127.0.0.1:1", "3.6.1", True, 4096, 0, ("alarm:CORRUPT",)), failure])


def test_members_have_role_readiness_and_lag() -> None:
    last = MOST_LAG + 10
    found = read_cluster(
        SECTION,
        cast(
            EtcdClient,
            etcd(report("one", None), report("two", last), report("three", 9), report("four", 10, "no log"),
                 report("five", None), report("six", None, "1.0 MiB received", loading=True)),
        ),
        0.5,
    )  # fmt: skip
    assert (found.name, found.active, found.term, found.commits) == ("plant", "one", 7, {"mqtt": last})
    assert {
        each.node: (each.role, each.ready, each.lag_commits, each.lag_s, each.problem) for each in found.members
    } == {
        "one": ("active", True, 0, 0.0, None),
        "two": ("standby", True, 0, 0.0, None),
        "three": ("standby", False, MOST_LAG + 1, 12.0, None),
        "four": ("blocked", False, MOST_LAG, 12.0, "no log"),
        "five": ("standby", False, None, None, None),
        "six": ("loading", False, None, None, "1.0 MiB received"),
    }
    assert found.etcd == (
        EtcdSnapshot("127.0.0.1:1", "3.6.1", True, 4096, None, ("alarm:CORRUPT",)),
        EtcdSnapshot("127.0.0.1:2", problem="connection refused", hint="check that it runs"),
    )
    assert [each.code for each in found.reasons] == ["blocked", "loading", "lag", "etcd_unavailable", "etcd_alarm"]


def test_settings_that_are_not_those_of_the_active_node_are_named(tmp_path: Path) -> None:
    def checksums(folder: str, **settings: object) -> dict[str, int]:
        file = tmp_path / folder / "penstock.yaml"
        file.parent.mkdir()
        (file.parent / "password").write_text("secret")
        file.write_text(json.dumps({"cluster": SECTION.model_dump(mode="json", include={"name", "node", "etcd"}),
                                    **settings}))  # fmt: skip
        return settings_checksums(load_config(file, {}, {}))

    bridge = {"name": "b", "url": "mqtt://h", "topics": [{"filter": "a"}], "username": "u", "password_file": "password"}
    same = checksums("one", bridges=[bridge])
    assert checksums("two", bridges=[{**bridge, "window": 200}]) == same, "a default, and a file in another directory"
    limits = checksums("three", bridges=[bridge], mqtt={"limits": {"max_queued_messages": 5}})
    other = checksums("four", bridges=[{**bridge, "url": "mqtt://i"}], statestore={"extensions": ["ttl"]})
    later = {**other, "rules": 1, "something new": 1}
    reports: list[dict[str, object]] = [
        {"node": "one", "settings": same}, {"node": "two", "settings": same}, {"node": "three", "settings": limits},
        {"node": "four", "settings": later}, {"node": "of an earlier version"},
    ]  # fmt: skip
    assert {each.node: each.differs for each in members_of(reports, "one", {}, 0)} == {
        "one": (), "two": (), "three": ("mqtt.limits",), "four": ("bridges", "rules", "statestore"),
        "of an earlier version": (),
    }  # fmt: skip
    assert not any(each.differs for each in members_of(reports, None, {}, 0)), "no node is active"


async def test_the_active_node_knows_its_members_by_their_reports(tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"etcd": ["127.0.0.1:1"]})
    member = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=section), lambda _: None)
    member._logs = cast(
        Any, SimpleNamespace(logs={"mqtt": SimpleNamespace(sequence=MOST_LAG + 10)}, close=lambda: None)
    )
    member.clock.offset_ms = 62_000 - boot_ms()
    try:
        assert member.member_warnings() == (), "it has not read the reports yet"
        member._reports = [json.loads(value) for _, value in (report("one", None), report("two", 9))]
        assert [each.code for each in member.member_warnings()] == ["lag", "no_standby"]
        assert member._ready_standbys() == 0
        member._reports = [json.loads(value) for _, value in (report("one", None), report("two", 10))]
        assert member._ready_standbys() == 1
        member.reloaded(NodeConfig.model_validate({"mqtt": {"limits": {"max_queued_messages": 5}}, "rules": []}))
        before = settings_checksums(member._config)
        assert {name for name, found in before.items() if member._settings[name] != found} == {"mqtt.limits"}
    finally:
        await member.close()


async def test_the_route_shows_the_cluster_to_viewers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.console.cluster.REFRESH_S", 0.0)
    security = Security(passwords=users(tmp_path, "viola", "nemo"), viewers=["viola"])
    node = Node(config(tmp_path / "data", security=security))
    answers: list[ClusterSnapshot | PenstockError] = [
        RefusedError("etcd: permission denied", why="no role", hint="grant a role"),
        ConfigError("etcd.password cannot be read"),
        replace(HEALTHY, commit_wait_s=0.25),
    ]  # fmt: skip

    def read() -> ClusterSnapshot:
        answer = answers.pop(0)
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    node.console.show_cluster(read)
    try:
        ready = await node.start()
        assert (await Api(ready, "").send("/cluster"))[0] == 401
        assert (await Api(ready, basic("nemo", "password of nemo")).send("/cluster"))[0] == 403
        viewer = Api(ready, basic("viola", "password of viola"))
        status, _, body = await viewer.send("/cluster")  # not 403: the console would ask for credentials
        assert status == 503
        assert body["error"] == {
            "code": "etcd_unavailable", "what": "etcd: permission denied", "why": "no role", "hint": "grant a role",
        }  # fmt: skip
        status, _, body = await viewer.send("/cluster")
        assert (status, body["error"]["what"]) == (503, "etcd.password cannot be read")
        found = await viewer.get("/cluster")
        assert (found["name"], found["active"], found["commit_wait_s"], found["reasons"]) == ("plant", "one", 0.25, [])
        assert [(each["node"], each["role"], each["ready"]) for each in found["members"]] == [
            ("one", "active", True), ("two", "standby", True),
        ]  # fmt: skip
        node.console.cluster = None
        status, _, body = await viewer.send("/cluster")
        assert (status, body["error"]["what"]) == (404, "this node is not in a cluster")
    finally:
        await node.close()


async def test_a_standby_redirects_browsers_and_refuses_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mqtt, http, etcd_port = free_ports(3)
    section = SECTION.model_copy(update={"etcd": [f"127.0.0.1:{etcd_port}"]})
    listener = {"bind": f"127.0.0.1:{http}", "url": "https://one.plant.example"}
    wanted: Any = {"data_dir": tmp_path, "mqtt": f"127.0.0.1:{mqtt}", "http": listener, "cluster": section}
    member = ClusterMembership(NodeConfig.model_validate(wanted), lambda _: None)
    monkeypatch.setattr(member, "_stand_by", lambda: None)
    monkeypatch.setattr("penstock.node.cluster.etcd_members.SILENT_S", 0.0)
    member.active = ActiveNode("two", "10.0.0.2:8080", {"mqtt": "10.0.0.2:1883"}, 7)
    standby = asyncio.Event()
    following = asyncio.create_task(member.become_active(standby.set))
    try:
        await asyncio.wait_for(standby.wait(), 30)
        at = f"127.0.0.1:{http}"
        assert running_node(tmp_path) == {"http": at, "http_local": at}  # what `penstock backup --data-dir` asks
        status, headers, _ = await ask(at, "/")
        assert (status, headers["location"], headers["cache-control"]) == (307, "http://10.0.0.2:8080/", "no-store")
        status, _, body = await ask(at, "/api/v1/keys/a?version=1")
        error = json.loads(body)["error"]
        assert (status, error["code"], error["hint"]) == (503, "standby", "use the active node: http://10.0.0.2:8080/")
        assert "the active node is two" in error["why"]
        member.active = member.active._replace(url="https://two.plant.example/console/")  # behind a proxy with TLS
        for path in ("", "webapi.htm?type=op_query"):
            _, headers, _ = await ask(at, f"/{path}")
            assert headers["location"] == f"https://two.plant.example/console/{path}"
        async with asyncio.timeout(30):
            while not (warnings := json.loads((await ask(at, "/readyz"))[2])["warnings"]):
                await asyncio.sleep(0.02)
        (warning,) = warnings
        assert warning.startswith(f"etcd 127.0.0.1:{etcd_port} does not answer; why: ")
        assert "start this member" in warning
        assert f'penstock_etcd_up{{endpoint="127.0.0.1:{etcd_port}"}} 0.0' in (await ask(at, "/metrics"))[2]
        member.active = None
        status, _, body = await ask(at, "/")
        assert status == 503
        assert body.startswith("standby: no node of the cluster is active at present\n")
        status, _, body = await ask(at, "/api/v1/overview")
        assert (status, json.loads(body)["error"]["hint"]) == (503, "see: penstock cluster status")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        described = json.loads(member._description())
        await member.close()
    assert (described["http"], described["url"]) == (at, "https://one.plant.example/")

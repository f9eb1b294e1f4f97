"""Credentials at the HTTP listeners: users of the password file, the administration token, and neither."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.node.config.mqtt import Security
from penstock.node.config.node import HttpListener, NodeConfig, TopicSection, Tube
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.security.passwords import edit_passwords, make_credential
from tests.unit.node.test_node import FREE, config, token_of

SNAPSHOT = "/broker.htm?method=admin_snapshot_message&topicName=water"
MOVE = (
    "/broker.htm?method=admin_manual_set_current_offset&topicName=water&groupName=lake&partitionId=0&manualOffset=0"
    "&modifyUser=me"
)
BROKER_CHANGES = (
    MOVE,
    "/broker.htm?method=admin_set_offset&groupName=lake&topicName=water&modifyUser=me",
    "/broker.htm?method=admin_set_offset_by_time&groupName=lake&topicName=water&recordTime=20260101000000&modifyUser=me",
    "/broker.htm?method=admin_clone_offset&sourceGroupName=lake&targetGroupName=sea&modifyUser=me",
    "/broker.htm?method=admin_rmv_offset&groupName=lake&modifyUser=me",
    "/broker.htm?method=admin_rmv_staged_rows&queryName=q&modifyUser=me",
    SNAPSHOT,
)
UNAUTHORIZED = "illegal access, unauthorized request!"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def ask(address: str, path: str, authorization: str = "", extra: str = "") -> tuple[int, dict[str, str], str]:
    """One request: status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{extra}"
    writer.write((head + (f"Authorization: {authorization}\r\n" if authorization else "") + "\r\n").encode())
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    await writer.wait_closed()
    first, _, body = answer.partition("\r\n\r\n")
    status, *lines = first.split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, body


async def answered(address: str, path: str, authorization: str = "") -> Mapping[str, object]:
    """The JSON object that answers a request."""
    found: dict[str, object] = json.loads((await ask(address, path, authorization))[2])
    return found


def users(directory: Path, *names: str) -> Path:
    path = directory / "passwords"
    fresh = {name: make_credential(name, f"password of {name}".encode()) for name in names}
    edit_passwords(path, lambda old: old | fresh)
    return path


@asynccontextmanager
async def running(wanted: NodeConfig) -> AsyncIterator[ReadyNode]:
    node = Node(wanted)
    try:
        yield await node.start()
    finally:
        await node.close()


WATER = Tube(topics={"water": TopicSection(partitions=1)})


async def test_without_users_queries_are_open_and_the_rest_needs_the_token(tmp_path: Path) -> None:
    async with running(config(tmp_path, tube=WATER)) as ready:
        broker = ready.tube_broker_http
        assert (await answered(broker, "/broker.htm?method=admin_query_pubinfo"))["result"] is True
        for path in BROKER_CHANGES:
            for credential in ("", "&confModAuthToken=abc"):
                refused = await answered(broker, path + credential)
                assert (refused["result"], refused["errMsg"]) == (False, UNAUTHORIZED), path
        status, _, body = await ask(ready.http, "/api/v1/clients", basic("ann", "password of ann"))
        assert (status, "this node has no users" in body) == (401, True)
        token = token_of(tmp_path)
        assert (await answered(broker, f"{SNAPSHOT}&confModAuthToken={token}"))["result"] is True
        assert (await answered(broker, MOVE, f"Bearer {token}"))["result"] is True
        wrong = await ask(broker, MOVE, "Bearer abc")
        assert (wrong[0], "not the administration token" in wrong[2]) == (401, True)
        methods = (await answered(broker, "/broker.htm?method=admin_get_methods"))["dataSet"]
        assert isinstance(methods, list)
        assert {row["method"] for row in methods if row["needAuth"]} >= {
            path.partition("method=")[2].partition("&")[0] for path in BROKER_CHANGES
        }


async def test_with_users_every_method_needs_credentials_on_both_listeners(tmp_path: Path) -> None:
    security = Security(passwords=users(tmp_path, "ann"))
    async with running(config(tmp_path / "data", tube=WATER, security=security)) as ready:
        ann = basic("ann", "password of ann")
        for address, query, change in (
            (ready.http, "/webapi.htm?method=admin_query_topic_info",
             "/webapi.htm?method=admin_add_new_topic_record&topicName=air&createUser=me"),
            (ready.tube_broker_http, "/broker.htm?method=admin_query_pubinfo", MOVE),
        ):  # fmt: skip
            for path in (query, change):
                status, headers, body = await ask(address, path)
                assert (status, json.loads(body)["errMsg"]) == (401, UNAUTHORIZED)
                assert headers["www-authenticate"].startswith("Basic ")
                for wrong in (basic("ann", "x"), basic("bob", "password of ann"), "Basic !", "Digest x", "Bearer abc"):
                    assert (await ask(address, path, wrong))[0] == 401, wrong
                assert (await answered(address, path, ann))["result"] is True
            token = token_of(tmp_path / "data")
            assert (await answered(address, query, f"Bearer {token}"))["result"] is True
            assert (await answered(address, f"{query}&confModAuthToken={token}"))["result"] is True


async def test_a_browser_that_hides_its_site_changes_nothing_with_the_password_that_it_keeps(tmp_path: Path) -> None:
    """An image of another site with ``referrerpolicy="no-referrer"`` over plain HTTP."""
    security = Security(passwords=users(tmp_path, "ann"))
    hidden = "User-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n"
    async with running(config(tmp_path / "data", tube=WATER, security=security)) as ready:
        ann, token = basic("ann", "password of ann"), token_of(tmp_path / "data")
        add = "/webapi.htm?method=admin_add_new_topic_record&topicName=air&brokerId=1&createUser=me"
        for address, change, query in (
            (ready.http, add, "/webapi.htm?method=admin_query_topic_info"),
            (ready.tube_broker_http, MOVE, "/broker.htm?method=admin_query_pubinfo"),
        ):
            status, _, body = await ask(address, change, ann, hidden)
            assert (status, json.loads(body)["result"], "by POST" in body) == (403, False, True)
            assert (await ask(address, f"{query}&callback=f", ann, hidden))[2].startswith('{"result":true')
            assert (await ask(address, f"{query}&callback=f", ann))[2].startswith('f({"result":true')
            for extra in (hidden + "Referer: http://x/\r\n", hidden + "Sec-Fetch-Site: none\r\n"):
                assert '"result":true' in (await ask(address, change, ann, extra))[2]
            # TubeMQ's own page and tools have the token in the form, which no other site knows.
            assert '"result":true' in (await ask(address, f"{change}&confModAuthToken={token}", "", hidden))[2]
            assert '"result":true' in (await ask(address, f"{change}&confModAuthToken={token}", ann, hidden))[2]


@pytest.mark.parametrize("open_metrics", [False, True])
async def test_health_is_open_and_metrics_by_setting(tmp_path: Path, *, open_metrics: bool) -> None:
    listener = HttpListener(bind=FREE, anonymous_metrics=open_metrics)
    security = Security(passwords=users(tmp_path, "ann"))
    async with running(config(tmp_path / "data", security=security, http=listener)) as ready:
        for path in ("/livez", "/readyz", "/"):
            assert (await ask(ready.http, path))[0] == 200
        status, _, body = await ask(ready.http, "/metrics")
        assert status == (200 if open_metrics else 401)
        if not open_metrics:
            assert json.loads(body)["errMsg"] == (
                "metrics need credentials: send a user (curl -u NAME), or start with http.anonymous_metrics: true"
            )
        assert (await ask(ready.http, "/metrics", basic("ann", "password of ann")))[0] == 200


@pytest.mark.parametrize(
    ("policies", "administrators", "allowed"),
    [
        (None, None, {"ann", "bob"}),
        ("[]", None, set()),
        ("[{principals: {usernames: [ann]}, tubeResources: [{method: Administer}]}]", None, {"ann"}),
        ("[]", ["ann"], {"ann"}),
        (None, ["bob"], {"bob"}),
    ],
)
async def test_only_administrators_may_use_the_administration(
    tmp_path: Path, *, policies: str | None, administrators: list[str] | None, allowed: set[str]
) -> None:
    (tmp_path / "policies.yaml").write_text(f"rules: {policies}\n")
    security = Security(
        passwords=users(tmp_path, "ann", "bob"),
        policies=None if policies is None else tmp_path / "policies.yaml",
        administrators=administrators,
    )
    async with running(config(tmp_path / "data", tube=WATER, security=security)) as ready:
        found = set()
        for user in ("ann", "bob"):
            shown = basic(user, f"password of {user}")
            assert (await answered(ready.tube_broker_http, "/broker.htm?method=admin_query_pubinfo", shown))["result"]
            if (await answered(ready.tube_broker_http, SNAPSHOT, shown))["result"]:
                found.add(user)
        assert found == allowed

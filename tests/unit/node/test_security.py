"""A node's security over sockets: each method, policies, and reloads that work or do not."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError, RefusedError
from penstock.mqtt.client import MqttClient, ScramAuthentication, TlsOptions, TokenAuthentication
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Publish, Will
from penstock.mqtt.engine.model.access import UNKNOWN, Rights
from penstock.mqtt.engine.model.journal import Source
from penstock.mqtt.in_process import AllowAll
from penstock.node.config.mqtt import Security
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node
from penstock.node.security import NodeSecurity, StorePolicy
from penstock.runtime.observability.metrics import Metrics
from penstock.security.passwords import edit_passwords, make_credential
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.codec.commands import Access
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.engine.store import Context
from tests.certificates import Authority
from tests.unit.node.test_node import config

DEADLINE_S = 60
EVERYTHING = """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["#"]}, {method: Subscribe, topics: ["#"]}]
    stateStoreResources: [{method: ReadWrite, keys: ["*"]}]
"""


def put_user(path: Path, name: str, password: bytes) -> None:
    credential = make_credential(name, password)
    edit_passwords(path, lambda old: old | {name: credential})


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[NodeSecurity, dict[str, tuple[str, int]]]]:
    """Listeners as the configuration says, on free ports."""
    mqtt = {"bind": "127.0.0.1:0", **options.pop("mqtt", {})}
    security = NodeSecurity(NodeConfig.model_validate({"mqtt": mqtt, **options}))
    bound = {name: await security.server.listen(security.settings(name)) for name in security.listeners}
    try:
        yield security, bound
    finally:
        await security.server.close()
        security.close()


async def refusal(address: tuple[str, int], **options: Any) -> int:
    with pytest.raises(RefusedError) as caught:
        async with MqttClient(*address, reconnect=False, **options):
            pass
    return caught.value.code


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_clients_need_no_credentials_without_files() -> None:
    async with serving() as (security, bound):
        assert not security.enforced
        assert security.settings("mqtt").access is None
        async with MqttClient(*bound["mqtt"], username="whoever") as client:
            assert await client.publish("a") in (0, 0x10)


async def test_passwords_scram_and_tokens(tmp_path: Path) -> None:
    passwords, tokens, token = tmp_path / "passwords", tmp_path / "tokens.yaml", tmp_path / "token"
    put_user(passwords, "ann", b"secret")
    digest = hashlib.sha256(b"t0ken").hexdigest()
    tokens.write_text(f"tokens: [{{sha256: {digest}, user: robot}}]\n")
    token.write_text("t0ken\n")
    files = {"passwords": str(passwords), "tokens": str(tokens)}
    async with serving(security=files) as (security, bound):
        address = bound["mqtt"]
        assert await refusal(address) == 0x87
        assert await refusal(address, username="ann", password="wrong") == 0x86
        assert await refusal(address, authentication=ScramAuthentication("ann", "wrong")) == 0x87
        async with MqttClient(*address, username="ann", password="secret") as client:
            await client.publish("a")
        async with MqttClient(*address, authentication=ScramAuthentication("ann", "secret")) as client:
            assert client.server.properties.authentication_method == "SCRAM-SHA-256"
            await client.reauthenticate()
            await client.publish("a")
        async with MqttClient(*address, authentication=TokenAuthentication(token)) as client:
            assert client.server.properties.authentication_method == "K8S-SAT"
            await client.reauthenticate()
            token.write_text("stolen")
            with contextlib.suppress(PenstockError):
                await client.reauthenticate()
            await until(lambda: security.server.stats.sessions == 0)
        assert security.stats.granted == 5


async def test_a_session_belongs_to_the_user_that_created_it(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    put_user(passwords, "ann", b"secret")
    put_user(passwords, "bob", b"secret")
    async with serving(security={"passwords": str(passwords)}) as (_, bound):
        same: dict[str, Any] = {"client_id": "one", "session_expiry_s": 60, "clean_start": False, "password": "secret"}
        async with MqttClient(*bound["mqtt"], username="ann", **same):
            assert await refusal(bound["mqtt"], username="bob", **same) == 0x87
        assert await refusal(bound["mqtt"], username="bob", **same) == 0x87
        async with MqttClient(*bound["mqtt"], username="ann", **same) as again:
            assert again.server.session_present


class SaltOf:
    """Asks the server for the SCRAM salt of a user, whose password it does not know [EnhancedAuthentication]."""

    method = "SCRAM-SHA-256"

    def __init__(self, user: str) -> None:
        self._user = user
        self.salt = ""

    def start(self) -> bytes:
        return f"n,,n={self._user},r=nonce".encode()

    def answer(self, data: bytes | None) -> bytes:
        self.salt = (data or b"").decode().split(",")[1]
        return b"c=biws,r=nonce,p=AAAA"

    def finish(self, data: bytes | None) -> None:
        raise AssertionError(f"accepted: {data!r}")


async def test_scram_does_not_tell_which_users_exist(tmp_path: Path) -> None:
    """The salt of an unknown user is as constant as that of a user."""
    passwords = tmp_path / "passwords"
    put_user(passwords, "ann", b"secret")
    salts: dict[str, set[str]] = {"ann": set(), "nobody": set()}
    for later_user in ("bob", "eve"):
        async with serving(
            mqtt={"listeners": {"more": {"bind": "127.0.0.1:0"}}}, security={"passwords": str(passwords)}
        ) as (_, bound):
            for address in bound.values():
                for user, found in salts.items():
                    probe = SaltOf(user)
                    assert await refusal(address, authentication=probe) == 0x87
                    found.add(probe.salt)
        put_user(passwords, later_user, b"secret")
    assert {user: len(found) for user, found in salts.items()} == {"ann": 1, "nobody": 1}


async def test_listeners_of_each_kind(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "127.0.0.1")
    mine = authority.issue("press-7")
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.file)}
    policies = tmp_path / "policies.yaml"
    policies.write_text(
        """
rules:
  - principals: {certificates: [press-7]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["press/{user}/#"]}]
"""
    )
    listeners = {
        "secure": {"bind": "127.0.0.1:0", "transport": "tls", "tls": tls},
        "web": {"bind": "127.0.0.1:0", "transport": "wss", "tls": {**tls, "client_certificates": "optional"}},
    }
    async with serving(mqtt={"listeners": listeners}, security={"policies": str(policies)}) as (security, bound):
        assert await refusal(bound["mqtt"]) == 0x87, "anonymous, and no rule lets it connect"
        options = TlsOptions(ca_file=authority.file, cert_file=mine[0], key_file=mine[1])
        urls = [f"mqtts://127.0.0.1:{bound['secure'][1]}", f"wss://127.0.0.1:{bound['web'][1]}/mqtt"]
        for url in urls:
            async with MqttClient.from_url(url, tls=options, reconnect=False) as client:
                assert await client.publish("press/press-7/x", qos=1) in (0, 0x10)
                with pytest.raises(RefusedError, match="0x87"):
                    await client.publish("elsewhere", qos=1)
        with pytest.raises(RefusedError):
            async with MqttClient.from_url(urls[1], tls=TlsOptions(ca_file=authority.file), reconnect=False):
                pass
        metrics = Metrics()
        security.show(metrics)
        page = metrics.render().decode()
        assert 'penstock_mqtt_listener_accepted_total{listener="web"} 2.0' in page
        assert "penstock_access_authenticated_total 2.0" in page


async def test_anonymous_clients_have_rules_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    passwords, policies = tmp_path / "passwords", tmp_path / "policies.yaml"
    put_user(passwords, "ann", b"ann")
    policies.write_text(
        """
rules:
  - principals: {anonymous: true}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["open/#"]}]
  - principals: {usernames: ["*"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["closed/#"]}]
"""
    )
    files = {"passwords": str(passwords), "policies": str(policies)}
    mqtt = {"authentication": ["password", "anonymous"]}
    async with serving(mqtt=mqtt, security=files) as (security, bound):
        for user, topic, other in ((None, "open/x", "closed/x"), ("ann", "closed/x", "open/x")):
            async with MqttClient(*bound["mqtt"], username=user, password=user, reconnect=False) as client:
                assert await client.publish(topic, qos=1) in (0, 0x10)
                with pytest.raises(RefusedError, match="0x87"):
                    await client.publish(other, qos=1)
                with pytest.raises(RefusedError, match="0x87") as refused:
                    await StateStoreClient(client).__aenter__()
                # Topics of the client's name are shown as in a rule.
                assert "Subscribe on 'clients/{clientIdHex}/#'" in (refused.value.hint or "")
        assert "applies to anonymous clients" not in caplog.text
        policies.write_text(EVERYTHING)
        assert security.reload(lambda: security.config)
        assert "denies everything" not in caplog.text
        policies.write_text("")
        assert security.reload(lambda: security.config)
        assert "the policy file has no rules: it denies everything" in caplog.text
    (warning,) = [record for record in caplog.records if "applies to anonymous clients" in record.getMessage()]
    assert vars(warning)["fields"] == {"rule": "rule 1", "policies": str(policies)}


async def test_a_reload_disconnects_only_clients_that_are_no_longer_accepted(tmp_path: Path) -> None:
    passwords, policies = tmp_path / "passwords", tmp_path / "policies.yaml"
    for name in ("ann", "bob", "eve"):
        put_user(passwords, name, name.encode())
    policies.write_text(EVERYTHING)
    files = {"passwords": str(passwords), "policies": str(policies)}
    async with serving(security=files) as (security, bound):
        clients = {}
        ended: dict[str, str] = {}
        for name in ("ann", "bob", "eve"):
            will = Will(f"plant/will/{name}", b"")
            client = clients[name] = MqttClient(
                *bound["mqtt"], client_id=name, username=name, password=name, reconnect=False, will=will
            )
            await client.connect()
            client.on_disconnected(partial(lambda name, error: ended.update({name: str(error)}), name))
        got: list[str] = []
        clients["ann"].listen("#", lambda message: got.append(message.topic))
        await clients["ann"].subscribe("plant/#")
        await clients["ann"].subscribe("secret/#")
        edit_passwords(passwords, lambda old: {n: c for n, c in old.items() if n != "eve"})
        policies.write_text(
            """
rules:
  - principals: {usernames: [ann]}
    brokerResources: [{method: Connect}, {method: Subscribe, topics: ["plant/#"]}]
"""
        )
        assert security.reload(lambda: security.config)
        await until(lambda: len(ended) == 2)
        assert set(ended) == {"bob", "eve"}
        assert all("0x87" in error for error in ended.values()), ended
        assert clients["ann"].connected
        security.server.outlet.publish(Publish("secret/x", b"", 0))
        security.server.outlet.publish(Publish("plant/x", b"", 0))
        await until(lambda: bool(got))
        assert got == ["plant/x"], "a subscription and wills that are not allowed any more are gone"
        with pytest.raises(RefusedError, match="0x87"):
            await clients["ann"].publish("plant/x", qos=1)
        assert security.stats.revoked == 2
        for client in clients.values():
            await client.disconnect()


async def test_a_topic_that_is_left_out_is_refused_as_the_limits_say(tmp_path: Path) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(
        """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources:
      - {method: Connect}
      - {method: Publish, topics: ["#"]}
      - {method: Subscribe, topics: ["#"], exceptTopics: ["test/nosubscribe"]}
"""
    )
    limits = {"subscription_denied_code": 0x80}
    async with (
        serving(mqtt={"limits": limits}, security={"policies": str(policies)}) as (_security, bound),
        MqttClient(*bound["mqtt"]) as client,
        client.subscription("#", qos=1) as messages,
    ):
        with pytest.raises(RefusedError) as caught:
            await client.subscribe("test/nosubscribe")
        assert caught.value.code == 0x80
        for topic in ("test/nosubscribe", "test/other"):
            await client.publish(topic, b"x", qos=1, retain=True)
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(messages)).topic == "test/other"
        async with client.subscription("test/+", qos=1) as kept, asyncio.timeout(DEADLINE_S):
            assert (await anext(kept)).topic == "test/other"


async def test_a_broken_file_keeps_what_held(tmp_path: Path) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(EVERYTHING)
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server", "127.0.0.1")
    tls = {"certificate": str(certificate), "key": str(key)}
    mqtt = {"listeners": {"secure": {"bind": "127.0.0.1:0", "transport": "tls", "tls": tls}}}
    files = {"policies": str(policies)}
    async with serving(mqtt=mqtt, security=files) as (security, bound), MqttClient(*bound["mqtt"]) as client:

        def read() -> NodeConfig:
            return security.config

        for path, text in ((policies, "rules: [nonsense]"), (certificate, "nonsense")):
            good = path.read_text()
            path.write_text(text)
            assert not security.reload(read)
            assert security.failure is not None
            assert str(path) in str(security.failure)
            assert await client.publish("a") in (0, 0x10)
            path.write_text(good)
        assert security.failed_reloads == 2

        def broken() -> NodeConfig:
            raise ConfigError("penstock.yaml:1:1: is not YAML")

        assert not security.reload(broken)
        assert security.reload(read)
        assert security.failure is None
        assert client.connected


async def test_handshakes_with_an_authority_that_is_no_longer_trusted_fail(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("server", "127.0.0.1")
    mine = old.issue("press-7")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.file.read_bytes())
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(trusted)}
    mqtt = {"listeners": {"secure": {"bind": "127.0.0.1:0", "transport": "tls", "tls": tls}}}
    async with serving(mqtt=mqtt) as (security, bound):
        context = ssl.create_default_context(cafile=str(old.file))
        context.load_cert_chain(mine[0], mine[1])
        reader, writer = await asyncio.open_connection(*bound["secure"], ssl=context)
        await until(lambda: bool(security.server._links))
        trusted.write_bytes(new.file.read_bytes())
        assert security.reload(lambda: security.config)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                writer.write(encode(Connect("press-7")))
                assert await reader.read() == b"", "it shook hands before, its CONNECT came after"
        assert security.stats.granted == 0
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("authentication", [["certificate"], ["password"], ["anonymous"]])
async def test_an_authority_that_is_not_trusted_any_more_ends_connections(
    tmp_path: Path, authentication: list[str]
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("server", "127.0.0.1")
    mine = old.issue("press-7")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.file.read_bytes())
    put_user(tmp_path / "passwords", "ann", b"secret")
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(trusted)}
    entry = {"bind": "127.0.0.1:0", "transport": "tls", "tls": tls, "authentication": authentication}
    security_files = {"passwords": str(tmp_path / "passwords")}
    async with serving(mqtt={"listeners": {"secure": entry}}, security=security_files) as (security, bound):
        client = MqttClient.from_url(
            f"mqtts://ann:secret@127.0.0.1:{bound['secure'][1]}",
            client_id="press-7",
            tls=TlsOptions(ca_file=old.file, cert_file=mine[0], key_file=mine[1]),
            reconnect=False,
        )
        ended: list[str] = []
        client.on_disconnected(lambda error: ended.append(str(error)))
        await client.connect()
        assert security.reload(lambda: security.config)
        assert client.connected
        trusted.write_bytes(old.file.read_bytes() + new.file.read_bytes())
        assert security.reload(lambda: security.config)
        assert client.connected
        trusted.write_bytes(new.file.read_bytes())
        assert security.reload(lambda: security.config)
        await until(lambda: bool(ended))
        assert "0x87" in ended[0]
        await client.disconnect()


async def test_new_certificates_and_limits_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("server", "127.0.0.1")
    mine = old.issue("press-7")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.file.read_bytes())
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(trusted)}
    mqtt = {"listeners": {"secure": {"bind": "127.0.0.1:0", "transport": "tls", "tls": tls}}}
    async with serving(mqtt=mqtt) as (security, bound):
        url = f"mqtts://127.0.0.1:{bound['secure'][1]}"
        options = TlsOptions(ca_file=old.file, cert_file=mine[0], key_file=mine[1])
        client = MqttClient.from_url(url, tls=options, reconnect=False)
        await client.connect()
        for written, read in zip((certificate, key), new.issue("server", "127.0.0.1"), strict=True):
            written.write_bytes(read.read_bytes())
        changed = security.config.model_dump()
        changed["mqtt"]["limits"]["max_packet_size"] = 5000
        changed["mqtt"]["bind"] = "127.0.0.1:1"
        trusted.write_bytes(old.file.read_bytes() + new.file.read_bytes())
        assert security.reload(lambda: NodeConfig.model_validate(changed))
        assert client.connected, "its authority is still trusted"
        restart = [record.getMessage() for record in caplog.records if "restart" in record.getMessage()]
        assert restart == [
            "mqtt.bind was changed after the start: the previous setting applies; hint: restart the node"
        ]
        theirs = new.issue("press-8")
        renewed = TlsOptions(ca_file=new.file, cert_file=theirs[0], key_file=theirs[1])
        async with MqttClient.from_url(url, tls=renewed, reconnect=False) as other:
            assert other.server.properties.maximum_packet_size == 5000
            trusted.write_bytes(new.file.read_bytes())
            assert security.reload(lambda: NodeConfig.model_validate(changed))
            await until(lambda: not client.connected)
            assert other.connected
        await client.disconnect()


async def test_keys_of_the_state_store(tmp_path: Path) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(
        """
rules:
  - principals: {clientIds: ["reader"]}
    brokerResources:
      [{method: Connect}, {method: Publish, topics: ["orders"]}, {method: Subscribe, topics: ["answers"]}]
    stateStoreResources: [{method: Read, keys: ["a*"]}, {method: Write, keys: ["ab"]}]
"""
    )
    files = {"policies": str(policies)}
    async with serving(security=files) as (security, bound), MqttClient(*bound["mqtt"], client_id="reader"):
        policy = StorePolicy(security)
        assert not policy.requests_observed
        (session,) = security.server._broker.sessions.values()
        assert session.rights is not None
        context = Context("reader", SDK, principal=session.rights.principal)
        assert policy.may_access(context, Access.READ, b"ax")
        assert not policy.may_access(context, Access.WRITE, b"ax")
        assert not policy.may_access(context, Access.READ | Access.WRITE, b"ax")
        assert policy.may_access(context, Access.READ | Access.WRITE, b"ab")
        assert policy.may_answer_on(context, "answers")
        assert not policy.may_answer_on(context, "orders")
    assert policy.may_access(Context("node", SDK), Access.WRITE, b"anything"), "the node itself"
    will = Context("reader", SDK, principal=UNKNOWN)
    assert not policy.may_access(will, Access.READ, b"ax"), "the will of a client that a restart found"
    assert not policy.may_answer_on(will, "answers")


RETAINING = """
rules:
  - principals: {{usernames: [ann, bob], clientIds: [nobody]}}
    brokerResources: [{{method: Connect}}, {{method: Subscribe, topics: ["#"]}}]
  - principals: {{usernames: [{user}], clientIds: [nobody]}}
    brokerResources: [{{method: Publish, topics: ["{topic}"]}}]
"""


async def retained_by(address: tuple[str, int]) -> list[str]:
    """The topics whose retained messages a new client of bob gets, sorted."""
    found: list[str] = []
    client = MqttClient(*address, client_id="reader", username="bob", password="bob", reconnect=False)
    async with client:
        client.listen("#", lambda message: found.append(message.topic))
        await client.subscribe("#")
        await client.subscribe("nothing")  # what came before its answer would be here by now
    return sorted(found)


async def test_a_retained_message_goes_only_while_its_publisher_may_publish_it(tmp_path: Path) -> None:
    passwords, policies = tmp_path / "passwords", tmp_path / "policies.yaml"
    for name in ("ann", "bob"):
        put_user(passwords, name, name.encode())
    policies.write_text(RETAINING.format(user="ann", topic="plant/#"))
    files = {"passwords": str(passwords), "policies": str(policies)}
    async with serving(security=files) as (security, bound):
        async with MqttClient(*bound["mqtt"], username="ann", password="ann", reconnect=False) as ann:
            await ann.publish("plant/a", b"1", retain=True)
            await ann.publish("plant/b", b"2", qos=2, retain=True)
        security.server.outlet.publish(Publish("node", b"of the node itself", 1, retain=True))
        assert await retained_by(bound["mqtt"]) == ["node", "plant/a", "plant/b"]
        for written, left in (
            (RETAINING.format(user="ann", topic="plant/a"), ["node", "plant/a"]),
            (RETAINING.format(user="bob", topic="plant/#"), ["node"]),
            (RETAINING.format(user="ann", topic="plant/+"), ["node", "plant/a", "plant/b"]),
        ):
            policies.write_text(written)
            assert security.reload(lambda: security.config)
            assert await retained_by(bound["mqtt"]) == left
        assert security.server.stats.retained_withheld == 3
        assert security.server.stats.retained == 3, "they are kept: rights may come back"
        edit_passwords(passwords, lambda old: {"bob": old["bob"]})
        assert security.reload(lambda: security.config)
        assert await retained_by(bound["mqtt"]) == ["node"], "a user that is gone has no rights"
        unchecked = security.config.model_copy(
            update={"security": security.config.security.model_copy(update={"check_retain_source": False})}
        )
        assert security.reload(lambda: unchecked)
        assert await retained_by(bound["mqtt"]) == ["node", "plant/a", "plant/b"]


def test_cached_rights_of_publishers_are_bounded_and_follow_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher whose message was read last stays cached; new access rules count without a reload."""
    policies = tmp_path / "policies.yaml"
    policies.write_text(RETAINING.format(user="ann", topic="plant/#"))
    security = NodeSecurity(NodeConfig.model_validate({"security": {"policies": str(policies)}}))
    asked: list[str] = []
    rights: list[Rights | None] = [Rights(AllowAll("ann"), AllowAll("ann").principal)]

    def recall(owner: str, _client_id: str) -> Rights | None:
        asked.append(owner)
        return rights[0]

    monkeypatch.setattr(security, "recall", recall)
    monkeypatch.setattr("penstock.node.security.SOURCES_KEPT", 2)
    allows = partial(security._may_still_publish, topic="plant/a", qos=1)
    for owner in ("a", "b", "a", "c", "a", "c", "b"):
        assert allows(Source(owner, "client"))
    assert asked == ["a", "b", "c", "b"]
    rights[0] = None
    security.access_rules = security.access_rules._replace()
    assert not allows(Source("b", "client"))
    security.close()


def test_bridges_keep_the_rights_that_they_act_with(tmp_path: Path) -> None:
    """What a bridge retained is judged by the rights of the user it acts for; without one it may do everything."""
    policies = tmp_path / "policies.yaml"
    policies.write_text(RETAINING.format(user="ann", topic="plant/#"))
    bridge = {"url": "mqtt://127.0.0.1:1", "topics": [{"filter": "x"}]}
    bridges = [{"name": "free", **bridge}, {"name": "bound", "acts_as": "ann", **bridge}]
    security = NodeSecurity(NodeConfig.model_validate({"bridges": bridges, "security": {"policies": str(policies)}}))
    may = {
        name: [
            rights is not None and rights.may_publish(topic, 1, retain=True)
            for topic in ("plant/a", "other")
            for rights in [security.recall(f"$bridge/{name}", f"$bridge/{name}")]
        ]
        for name in ("free", "bound", "gone")
    }
    assert may == {"free": [True, True], "bound": [True, False], "gone": [False, False]}
    security.close()


async def test_the_publisher_of_a_retained_message_survives_a_restart(tmp_path: Path) -> None:
    passwords, policies = tmp_path / "passwords", tmp_path / "policies.yaml"
    for name in ("ann", "bob"):
        put_user(passwords, name, name.encode())
    policies.write_text(RETAINING.format(user="ann", topic="plant/#"))
    found: dict[str, list[str]] = {}
    for user in ("ann", "bob"):
        policies.write_text(RETAINING.format(user=user, topic="plant/#"))
        node = Node(config(tmp_path / "data", security=Security(passwords=passwords, policies=policies)))
        ready = await node.start()
        try:
            host, _, port = ready.mqtt.partition(":")
            async with MqttClient(host, int(port), username=user, password=user, reconnect=False) as client:
                await client.publish(f"plant/{user}", b"1", retain=True)
            found[user] = await retained_by((host, int(port)))
        finally:
            await node.close()
    assert found == {"ann": ["plant/ann"], "bob": ["plant/bob"]}


async def test_changes_that_need_a_restart_are_warnings_until_then(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    put_user(passwords, "ann", b"pw")
    start = config(tmp_path / "data")
    changed = start.model_dump() | {"log_level": "error", "disk": {"max_bytes": 1 << 30}}
    changed["security"]["passwords"] = str(passwords)
    changed["mqtt"]["listeners"] = {"more": {"bind": "127.0.0.1:0"}}
    changed["mqtt"]["limits"] |= {"queue_overflow": "disconnect", "sys_interval_s": 5}
    changed["statestore"]["max_keys"] = 5
    node = Node(start)
    await node.start()
    try:
        for _ in range(2):
            assert node.reload(lambda: NodeConfig.model_validate(changed))
            assert node.health.warnings() == [
                (
                    "security.passwords was added after the start: clients without credentials are still accepted; "
                    "hint: restart the node"
                ),
                *(
                    f"{option} was changed after the start: the previous setting applies; hint: restart the node"
                    for option in (
                        "disk",
                        "log_level",
                        "mqtt.limits.queue_overflow",
                        "mqtt.listeners.more",
                        "statestore",
                    )
                ),
            ]
            limits = node.security.server.limits
            assert (limits.queue_overflow, limits.sys_interval_s) == ("drop_newest", 5)
        assert node.reload(lambda: start)
        assert node.health.warnings() == []
    finally:
        await node.close()


async def test_log_lines_name_the_user_and_the_listener(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.mqtt.access")
    put_user(tmp_path / "passwords", "press-9", b"right")
    (tmp_path / "policies.yaml").write_text("rules: []\n")
    files = {"passwords": str(tmp_path / "passwords"), "policies": str(tmp_path / "policies.yaml")}
    async with serving(security=files) as (_, bound):
        assert (
            await refusal(bound["mqtt"], client_id="c", authentication=ScramAuthentication("press-9", "wrong")) == 0x87
        )
        assert await refusal(bound["mqtt"], client_id="c", username="press-9", password=b"right") == 0x87
    empty, refused, denied = [record.getMessage() for record in caplog.records]
    assert empty == "the policy file has no rules: it denies everything, to every client"
    assert refused.startswith("authentication failed: client 'c', user 'press-9', from 127.0.0.1 on mqtt: ")
    assert denied.startswith("not allowed to connect: client 'c', user 'press-9', from 127.0.0.1 on mqtt: no rule ")

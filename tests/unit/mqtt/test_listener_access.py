"""Authentication by each method, authorization by a policy, and their reload."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import pytest
from scramp import ScramClient

from penstock.mqtt.engine.model.access import Action, Challenge, Credentials, Decision, Granted, Origin, Refused
from penstock.mqtt.listener_access import (
    AccessRules,
    AccessStats,
    AuthenticatedClient,
    AuthenticationMethod,
    Certificate,
    InProcessAccess,
    ListenerAccess,
)
from penstock.mqtt.password_checks import PasswordChecks
from penstock.node.security import NODE_TOPICS
from penstock.security.passwords import make_credential
from penstock.security.policy_file import parse_policy
from penstock.security.tokens import Token
from penstock.statestore.binding import notify_topic

ANN = make_credential("ann", b"secret")
TOKEN = Token("robot", frozenset({"robots"}), {"site": "berlin"})
TOKENS = {hashlib.sha256(b"t0ken").digest(): TOKEN}
SHOWN = Origin(address="192.0.2.1", certificate=Certificate("press-7", b"anchor"))
POLICY = parse_policy("""
rules:
  - principals: {usernames: [ann], certificates: ["press-*"]}
    brokerResources:
      - {method: Connect, clientIds: ["{user}"]}
      - {method: Publish, topics: ["from/{user}/#"]}
      - {method: Subscribe, topics: ["to/{user}/#"]}
      - {method: HighPriority, topics: ["alarms"]}
""")


OPEN = """
rules:
  - principals: {usernames: ["*"]}
    brokerResources:
      - {method: Connect}
      - {method: Publish, topics: ['#']}
"""


def access(*methods: AuthenticationMethod, policy: bool = False) -> ListenerAccess:
    access_rules = AccessRules(users={"ann": ANN}, tokens=TOKENS, policy=POLICY if policy else None)
    return ListenerAccess(
        frozenset(methods),
        access_rules,
        PasswordChecks(),
        AccessStats(),
        now=lambda: 7,
        node_topics=NODE_TOPICS,
    )


async def decide(gate: ListenerAccess, credentials: Credentials) -> Decision:
    future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    gate.authenticate(credentials, lambda decision, _: future.set_result(decision), 7)
    async with asyncio.timeout(60):
        return await future


def client_of(decision: Decision) -> AuthenticatedClient:
    assert isinstance(decision, Granted), decision
    assert isinstance(decision.principal, AuthenticatedClient)
    return decision.principal


@pytest.mark.parametrize(
    ("methods", "credentials", "found"),
    [
        ([AuthenticationMethod.ANONYMOUS], Credentials(client_id="c"), "anonymous"),
        ([AuthenticationMethod.ANONYMOUS], Credentials(client_id="c", username="ann", password=b"x"), "anonymous"),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c", username="ann", password=b"secret"), "user:ann"),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c", username="ann", password=b"wrong"), 0x86),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c", username="bob", password=b"secret"), 0x86),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c", username="ann"), 0x86),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c"), 0x87),
        ([AuthenticationMethod.PASSWORD, AuthenticationMethod.ANONYMOUS], Credentials(client_id="c"), "anonymous"),
        (
            [AuthenticationMethod.PASSWORD, AuthenticationMethod.ANONYMOUS],
            Credentials(client_id="c", username="ann", password=b"no"),
            0x86,
        ),
        ([AuthenticationMethod.CERTIFICATE], Credentials(client_id="c", origin=SHOWN), "certificate:press-7"),
        (
            [AuthenticationMethod.CERTIFICATE],
            Credentials(client_id="c", username="x", origin=SHOWN),
            "certificate:press-7",
        ),
        ([AuthenticationMethod.CERTIFICATE], Credentials(client_id="c"), 0x87),
        (
            [AuthenticationMethod.CERTIFICATE],
            Credentials(client_id="c", origin=Origin(certificate=Certificate(None, b"a"))),
            0x87,
        ),
        (
            [AuthenticationMethod.CERTIFICATE, AuthenticationMethod.PASSWORD],
            Credentials(client_id="c", username="ann", password=b"secret", origin=SHOWN),
            "user:ann",
        ),
        ([AuthenticationMethod.TOKEN], Credentials(client_id="c", method="K8S-SAT", data=b"t0ken\n"), "user:robot"),
        ([AuthenticationMethod.TOKEN], Credentials(client_id="c", method="K8S-SAT", data=b"other"), 0x87),
        ([AuthenticationMethod.TOKEN], Credentials(client_id="c", method="K8S-SAT"), 0x87),
        ([AuthenticationMethod.PASSWORD], Credentials(client_id="c", method="K8S-SAT", data=b"t0ken"), 0x8C),
        ([AuthenticationMethod.TOKEN], Credentials(client_id="c", method="SCRAM-SHA-256", data=b"n,,n=ann,r=x"), 0x8C),
        ([AuthenticationMethod.SCRAM], Credentials(client_id="c", method="SCRAM-SHA-256", data=b"no"), 0x87),
        ([AuthenticationMethod.SCRAM], Credentials(client_id="c", method="GSSAPI"), 0x8C),
        ([AuthenticationMethod.SCRAM], Credentials(client_id="c", username="ann", password=b"secret"), 0x87),
    ],
)
async def test_methods(methods: list[AuthenticationMethod], credentials: Credentials, found: str | int) -> None:
    decision = await decide(access(*methods), credentials)
    assert (decision.reason_code if isinstance(decision, Refused) else client_of(decision).name) == found


@pytest.mark.parametrize(
    ("methods", "credentials", "reason"),
    [
        (
            [AuthenticationMethod.CERTIFICATE],
            Credentials(client_id="c", origin=Origin(certificate=Certificate(None, b"a"))),
            "its certificate has no name of the kind in the listener's tls.name",
        ),
        (
            [AuthenticationMethod.SCRAM, AuthenticationMethod.CERTIFICATE],
            Credentials(client_id="c"),
            "no credentials for certificate, scram",
        ),
        (
            [AuthenticationMethod.PASSWORD],
            Credentials(client_id="c", username="ann", password=b"wrong"),
            "unknown user or wrong password",
        ),
    ],
)
async def test_the_log_names_the_cause_of_a_refusal(
    methods: list[AuthenticationMethod], credentials: Credentials, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.mqtt")
    assert isinstance(await decide(access(*methods), credentials), Refused)
    assert reason in caplog.text


async def test_reauthentication_keeps_the_client_object() -> None:
    """The state store's observers remember it, and a reload only knows of the session's."""
    gate = access(AuthenticationMethod.TOKEN, policy=True)
    other = Token("robot", frozenset({"robots", "elders"}), {})
    stranger = Token("somebody", frozenset(), {})
    gate.access_rules = gate.access_rules._replace(
        tokens=TOKENS | {hashlib.sha256(b"new").digest(): other, hashlib.sha256(b"not").digest(): stranger},
        policy=parse_policy(OPEN),
    )
    before = client_of(await decide(gate, Credentials(client_id="c", method="K8S-SAT", data=b"t0ken")))
    again = Credentials(client_id="c", method="K8S-SAT", data=b"new", previous=before)
    assert client_of(await decide(gate, again)) is before
    assert (before.credential, before.principal.groups) == (other, frozenset({"robots", "elders"}))
    assert gate.revalidate(before, None)
    somebody = Credentials(client_id="c", method="K8S-SAT", data=b"not", previous=before)
    assert client_of(await decide(gate, somebody)) is not before
    assert before.name == "user:robot"


@pytest.mark.parametrize(
    ("methods", "owner", "user", "groups"),
    [
        ([AuthenticationMethod.PASSWORD], "user:ann", "ann", set()),
        ([AuthenticationMethod.SCRAM], "user:ann", "ann", set()),
        ([AuthenticationMethod.TOKEN], "user:ann", None, set()),
        ([AuthenticationMethod.PASSWORD], "user:bob", None, set()),
        ([AuthenticationMethod.TOKEN], "user:robot", "robot", {"robots"}),
        ([AuthenticationMethod.PASSWORD], "user:robot", None, set()),
        ([AuthenticationMethod.PASSWORD], "", None, set()),
        ([AuthenticationMethod.PASSWORD], "$bridge/x", None, set()),
    ],
)
def test_session_owners_are_recovered_after_a_restart(
    methods: list[AuthenticationMethod], owner: str, user: str | None, groups: set[str]
) -> None:
    gate = access(*methods)
    more = Token("robot", frozenset({"robots", "elders"}), {"site": "paris"})
    gate.access_rules = gate.access_rules._replace(tokens=TOKENS | {b"more": more})
    client = gate.recover_client(owner, "c")
    assert (client is None) is (user is None)
    if client is not None:
        assert (client.principal.user, client.principal.client_id, client.name) == (user, "c", owner)
        assert client.principal.groups == groups, "of several tokens, what all of them give"
        assert not client.principal.attributes


def test_owners_without_a_user_and_those_who_may_not_connect() -> None:
    anonymous = access(AuthenticationMethod.ANONYMOUS).recover_client("", "c")
    assert anonymous is not None
    assert anonymous.name == "anonymous"
    shown = access(AuthenticationMethod.CERTIFICATE, policy=True).recover_client("certificate:press-7", "press-7")
    assert shown is not None
    assert shown.permissions is not None
    assert shown.permissions.may_publish("from/press-7/a")
    assert not shown.permissions.may_publish("from/press-8/a")
    assert (
        access(AuthenticationMethod.CERTIFICATE, policy=True).recover_client("certificate:press-7", "another") is None
    )


async def test_a_part_of_the_node_acts_for_a_user() -> None:
    access_rules = AccessRules(policy=POLICY)
    gate = InProcessAccess("ann", "$bridge/x", access_rules, PasswordChecks(), AccessStats(), lambda: 7)
    client = client_of(await decide(gate, Credentials(client_id="$bridge/x")))
    assert client.name == "$bridge/x", "its sessions are not the user's"
    assert gate.allowed(client, Action.PUBLISH, "from/ann/a", 1, retain=False)
    assert not gate.allowed(client, Action.PUBLISH, "from/bob/a", 1, retain=False)
    gate.access_rules = AccessRules(policy=parse_policy(OPEN))
    gate.refresh(client)
    assert gate.allowed(client, Action.PUBLISH, "from/bob/a", 1, retain=False)
    assert client.name == "$bridge/x"


@pytest.mark.parametrize("password", ["secret", "wrong"])
async def test_scram(password: str) -> None:
    gate = access(AuthenticationMethod.SCRAM)
    scram = ScramClient(["SCRAM-SHA-256"], "ann", password)
    first = await decide(
        gate, Credentials(client_id="c", method="SCRAM-SHA-256", data=scram.get_client_first().encode())
    )
    assert isinstance(first, Challenge)
    assert first.data is not None
    scram.set_server_first(first.data.decode())
    answers: list[Decision] = []
    first.proceed(scram.get_client_final().encode(), lambda decision, _: answers.append(decision), 8)
    (last,) = answers
    if password == "wrong":
        assert last == Refused(0x87)
        return
    assert client_of(last).name == "user:ann"
    assert isinstance(last, Granted)
    assert last.data is not None
    scram.set_server_final(last.data.decode())


async def test_a_user_that_is_changed_while_it_is_checked() -> None:
    gate = access(AuthenticationMethod.PASSWORD)
    deciding = asyncio.create_task(decide(gate, Credentials(client_id="c", username="ann", password=b"secret")))
    await asyncio.sleep(0)
    gate.access_rules = gate.access_rules._replace(users={"ann": make_credential("ann", b"other")})
    assert await deciding == Refused(0x86)


async def test_policies() -> None:
    gate = access(AuthenticationMethod.PASSWORD, AuthenticationMethod.ANONYMOUS, policy=True)
    login = Credentials(client_id="ann", username="ann", password=b"secret")
    ann = client_of(await decide(gate, login))

    def may(action: Action, topic: str) -> bool:
        return gate.allowed(ann, action, topic, 0, retain=False)

    assert may(Action.PUBLISH, "from/ann/x")
    assert not may(Action.PUBLISH, "from/bob/x")
    assert may(Action.SUBSCRIBE, "$share/g/to/ann/#")
    assert not may(Action.SUBSCRIBE, "#")
    assert may(Action.RECEIVE, "to/ann/x")
    assert not may(Action.RECEIVE, "other")
    assert may(Action.RECEIVE, notify_topic("other", b"k"))
    assert not may(Action.RECEIVE, "clients/statestore/v1/x"), "clients may publish there"
    assert may(Action.HIGH_PRIORITY, "alarms")
    assert not may(Action.HIGH_PRIORITY, "to/ann/x")
    assert not may(Action.OBSERVE_REQUESTS, "to/ann/x")
    trusting = access(AuthenticationMethod.ANONYMOUS)
    anybody = client_of(await decide(trusting, Credentials(client_id="c")))
    assert trusting.allowed(anybody, Action.RECEIVE, "x", 0, retain=False)
    assert not trusting.allowed(anybody, Action.OBSERVE_REQUESTS, "x", 0, retain=False), "without a policy nobody may"
    other = Credentials(client_id="c", username="ann", password=b"secret")
    assert await decide(gate, other) == Refused(0x87), "with that client identifier it may not"
    assert await decide(gate, Credentials(client_id="ann")) == Refused(0x87)


async def test_a_reload_revokes_access() -> None:
    gate = access(
        AuthenticationMethod.PASSWORD,
        AuthenticationMethod.CERTIFICATE,
        AuthenticationMethod.TOKEN,
        AuthenticationMethod.ANONYMOUS,
    )
    anchors = frozenset({b"anchor"})
    ann = client_of(await decide(gate, Credentials(client_id="ann", username="ann", password=b"secret")))
    press = client_of(await decide(gate, Credentials(client_id="press-7", origin=SHOWN)))
    robot = client_of(await decide(gate, Credentials(client_id="r", method="K8S-SAT", data=b"t0ken")))
    nobody = client_of(await decide(gate, Credentials(client_id="n")))

    def welcome() -> list[bool]:
        return [gate.revalidate(client, anchors) for client in (ann, press, robot, nobody)]

    before = gate.access_rules
    assert welcome() == [True, True, True, True]
    gate.access_rules = before._replace(users={"ann": make_credential("ann", b"secret")})
    assert welcome() == [False, True, True, True], "another hash: the password was set anew"
    gate.access_rules = before._replace(tokens={})
    assert welcome() == [True, True, False, True]
    gate.access_rules = before
    assert not gate.revalidate(press, frozenset())
    assert not gate.revalidate(press, None)
    gate.methods = frozenset({AuthenticationMethod.PASSWORD})
    assert welcome() == [True, False, False, False]
    gate.methods = frozenset(AuthenticationMethod)
    gate.access_rules = before._replace(policy=POLICY)
    assert welcome() == [True, True, False, False], "the policy lets only those connect"
    assert gate.allowed(ann, Action.PUBLISH, "from/ann/x", 0, retain=False)
    assert not gate.allowed(ann, Action.PUBLISH, "elsewhere", 0, retain=False)
    gate.access_rules = before
    assert welcome() == [True, True, True, True]
    assert gate.allowed(ann, Action.PUBLISH, "elsewhere", 0, retain=False)

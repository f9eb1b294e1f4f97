"""Decisions of a policy: against a slow sequential model, and what it remembers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.topics import matches
from penstock.security.policy import DECISIONS_KEPT, NOTHING, Permissions, Principal
from penstock.security.policy_file import BrokerResource, PolicyFile, parse_policy

TOPICS = ["/".join(levels) for n in (1, 2, 3) for levels in itertools.product("abu", repeat=n)]
FILTERS = ["#", "a/#", "a/+", "+/b", "{clientId}/#", "a/{user}", "{attributes.site}/+/b", "u/u/u"]
CLIENTS = ["a", "b", "u", "+"]

resources = st.builds(
    lambda method, topics: {"method": method, "topics": topics},
    st.sampled_from(["Publish", "Subscribe"]),
    st.lists(st.sampled_from(FILTERS), min_size=1, max_size=3),
)
principals = st.one_of(
    st.builds(lambda c: {"clientIds": c}, st.lists(st.sampled_from([*CLIENTS[:3], "*"]), min_size=1, max_size=2)),
    st.builds(lambda u: {"usernames": [u]}, st.sampled_from("ab")),
    st.builds(lambda g: {"groups": [g]}, st.sampled_from(["g", "h"])),
    st.builds(lambda s: {"attributes": [{"site": s, "floor": "1"}]}, st.sampled_from("ab")),
)
rules = st.lists(
    st.builds(lambda p, r: {"principals": p, "brokerResources": r}, principals, st.lists(resources, max_size=3)),
    max_size=4,
)
USERS: dict[str, dict[str, Any]] = {
    "a": {"groups": ["g"], "attributes": {"site": "a", "floor": "1"}},
    "b": {"groups": ["h"]},
}


def model_applies(who: dict[str, list[object]], client: str, user: str | None) -> bool:
    known = USERS.get(user or "", {})
    attributes = known.get("attributes", {})
    return (
        any(text in ("*", client) for text in who.get("clientIds", []))
        or user in who.get("usernames", [])
        or any(group in known.get("groups", []) for group in who.get("groups", []))
        or any(isinstance(w, dict) and w.items() <= attributes.items() for w in who.get("attributes", []))
    )


def model_filters(text: str, client: str, user: str | None) -> str | None:
    """The filter with names put in where those are plain words; None where it then allows nothing."""
    attributes = USERS.get(user or "", {}).get("attributes", {})
    for name, value in (("{clientId}", client), ("{user}", user), ("{attributes.site}", attributes.get("site"))):
        if name in text:
            if value is None or not value.isalnum():
                return None
            text = text.replace(name, value)
    return text


@given(rules, st.sampled_from(CLIENTS), st.sampled_from([None, "a", "b"]))
def test_against_the_model(written: list[dict[str, object]], client: str, user: str | None) -> None:
    policy = PolicyFile.model_validate({"rules": written, "users": USERS}).policy()
    principal = policy.describe(Principal(client, user=user))
    permissions = policy.permissions(principal)
    allowed: dict[str, list[str]] = {"Publish": [], "Subscribe": []}
    for rule in written:
        who, granted = rule["principals"], rule["brokerResources"]
        assert isinstance(who, dict)
        assert isinstance(granted, list)
        if model_applies(who, client, user):
            for resource in granted:
                found = [model_filters(text, client, user) for text in resource["topics"]]
                allowed[resource["method"]] += [text for text in found if text is not None]
    for _ in range(2):  # the second answers come from memory
        for topic in TOPICS:
            assert permissions.may_publish(topic) is any(matches(text, topic) for text in allowed["Publish"])
            assert permissions.may_subscribe(topic) is any(matches(text, topic) for text in allowed["Subscribe"])
            assert permissions.may_receive(topic) is permissions.may_subscribe(topic)


def permissions_of(text: str, principal: Principal) -> Permissions:
    policy = parse_policy(text)
    return policy.permissions(policy.describe(principal))


def test_an_empty_file_denies() -> None:
    for permissions in (permissions_of("", Principal("c", user="u")), NOTHING):
        assert not permissions.may_connect("c")
        assert not permissions.may_publish("a")
        assert not permissions.may_subscribe("a")
        assert not permissions.may_pass_first("a")
        assert not permissions.may_read(b"k")
        assert not permissions.may_write(b"k")


STORE = """
rules:
  - principals: {clientIds: ["*"]}
    stateStoreResources:
      - {method: read, keys: ["colors/*", "own/{principal.clientId}/*"]}
      - {method: WRITE, keyType: string, keys: ["a*", "{x}"]}
      - {method: ReadWrite, keyType: Binary, keys: ["AP8="]}
"""


def test_keys_of_the_state_store() -> None:
    permissions = permissions_of(STORE, Principal("c1"))
    assert permissions.may_read(b"colors/red")
    assert not permissions.may_write(b"colors/red")
    assert permissions.may_read(b"own/c1/x")
    assert not permissions.may_read(b"own/c2/x")
    assert permissions.may_write(b"a*")
    assert permissions.may_write(b"{x}"), "a String is taken as it is"
    assert not permissions.may_write(b"ab")
    assert permissions.may_read(b"\x00\xff")
    assert permissions.may_write(b"\x00\xff")


def test_observing_requests_is_granted_by_name_alone() -> None:
    text = """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["#"]}, {method: Subscribe, topics: ["#"]}]
  - principals: {usernames: [ann]}
    brokerResources: [{method: observerequests, topics: ["statestore/#"]}]
  - principals: {usernames: [bob]}
    brokerResources: [{method: ObserveRequests}]
"""
    assert parse_policy(text).requests_observed
    ann = permissions_of(text, Principal("x", user="ann"))
    assert ann.may_observe_requests("statestore/v1")
    assert not ann.may_observe_requests("clients/x")
    assert permissions_of(text, Principal("x", user="bob")).may_observe_requests("clients/x")
    assert not permissions_of(text, Principal("x")).may_observe_requests("statestore/v1")


def test_a_rule_for_anonymous_clients_applies_only_to_them() -> None:
    text = """
rules:
  - principals: {anonymous: true}
    brokerResources: [{method: Publish, topics: ["from/anyone"]}]
  - principals: {anonymous: true, usernames: [ann]}
    brokerResources: [{method: Publish, topics: ["from/both"]}]
"""
    anonymous = permissions_of(text, Principal("x"))
    assert anonymous.may_publish("from/anyone")
    assert anonymous.may_publish("from/both")
    for known in (Principal("x", user="bob"), Principal("x", certificate="press-7"), Principal("x", user="ann")):
        permissions = permissions_of(text, known)
        assert not permissions.may_publish("from/anyone")
        assert permissions.may_publish("from/both") is (known.user == "ann")


def test_rules_that_anonymous_clients_have_by_the_way() -> None:
    resources = [{"method": "Publish", "topics": ["a"]}]
    principals = [
        {"clientIds": ["*"]},
        {"clientIds": ["x", "{clientId}"], "usernames": ["ann"]},
        {"clientIds": ["?*"]},
        {"clientIds": ["*"], "anonymous": True},
        {"clientIds": ["press-*"]},
        {"usernames": ["*"]},
        {"anonymous": True},
    ]
    written = [{"principals": who, "brokerResources": resources} for who in principals]
    written[1]["name"] = "by identifier"
    policy = PolicyFile.model_validate({"rules": written}).policy()
    assert policy.open_to_anonymous == ["rule 1", "by identifier", "rule 3"]


def test_topics_and_groups_of_the_tube() -> None:
    text = """
rules:
  - principals: {usernames: [ann]}
    tubeResources:
      - {method: produce, topics: ["line-*", "{user}"]}
      - {method: Consume, topics: [water]}
      - {method: Consume, topics: [oil], groups: ["{user}-*"]}
      - {method: Administer, topics: ["line-*"]}
  - principals: {usernames: [root]}
    tubeResources: [{method: Administer}]
"""
    ann = permissions_of(text, Principal("", user="ann"))
    assert [topic for topic in ("line-1", "ann", "bob", "water") if ann.may_produce(topic)] == ["line-1", "ann"]
    assert ann.may_produce("line-1"), "from memory"
    assert ann.may_consume("water", "any")
    assert ann.may_consume("oil", "ann-1")
    assert not ann.may_consume("oil", "any")
    assert ann.may_consume("oil", None), "without a group, no group's offset moves"
    assert not ann.may_consume("line-1", None)
    assert ann.may_administer("line-1")
    assert not ann.may_administer()
    root = permissions_of(text, Principal("", user="root"))
    assert root.may_administer()
    assert root.may_administer("water")
    assert not root.may_produce("water")
    for wrong, words in (
        ({"method": "Produce"}, "needs `topics`"),
        ({"method": "Produce", "topics": ["a"], "groups": ["g"]}, "not `groups`"),
        ({"method": "Publish", "topics": ["a"]}, "Administer"),
    ):
        with pytest.raises(ValueError, match=words):
            PolicyFile.model_validate({"rules": [{"principals": {"usernames": ["*"]}, "tubeResources": [wrong]}]})


def test_connect_and_high_priority() -> None:
    text = """
rules:
  - principals: {usernames: [ann]}
    brokerResources:
      - {method: connect, clientIds: ["ann-*"]}
      - {method: HighPriority, topics: ["alarms/#"]}
  - principals: {groups: [operators]}
    brokerResources: [{method: Connect}, {method: HighPriority}]
users: {bob: {groups: [operators]}}
"""
    ann = permissions_of(text, Principal("ann-1", user="ann"))
    assert ann.may_connect("ann-1")
    assert not ann.may_connect("bob-1")
    assert ann.may_pass_first("alarms/fire")
    assert not ann.may_pass_first("other")
    bob = permissions_of(text, Principal("x", user="bob"))
    assert bob.may_connect("anything")
    assert bob.may_pass_first("other")
    assert not bob.may_observe_requests("other")
    assert not parse_policy(text).requests_observed
    assert not permissions_of(text, Principal("ann-1")).may_connect("ann-1"), "a name that is only claimed"
    assert not permissions_of(text, Principal("x", certificate="ann")).may_connect("ann-1"), "not the same ann"


def test_shared_subscriptions_are_checked_by_their_filter() -> None:
    subscribe = BrokerResource.model_validate({"method": "Subscribe", "topics": ["a/#"]})
    policy = PolicyFile.model_validate(
        {"rules": [{"principals": {"clientIds": ["*"]}, "brokerResources": [subscribe]}]}
    ).policy()
    permissions = policy.permissions(Principal("c"))
    assert permissions.may_subscribe("$share/g/a/b")
    assert not permissions.may_subscribe("$share/g/b")
    assert not permissions.may_subscribe("$share/a/#")


def test_topics_that_are_left_out() -> None:
    resources = [
        {"method": "Subscribe", "topics": ["#", "$SYS/#"], "exceptTopics": ["test/nosubscribe", "hr/#", "$SYS/x/#"]},
        {"method": "Publish", "topics": ["plant/{user}/#"], "exceptTopics": ["plant/+/setpoint"]},
        {"method": "Subscribe", "topics": ["hr/notices"]},
        {"method": "HighPriority", "exceptTopics": ["bulk/#"]},
    ]
    file = PolicyFile.model_validate({"rules": [{"principals": {"usernames": ["*"]}, "brokerResources": resources}]})
    ann = file.policy().permissions(Principal("c", user="ann"))
    asked = {
        "#": True,  # wider than what is left out: then messages are left out, below
        "test/nosubscribe": False,
        "test/+": True,
        "$share/g/test/nosubscribe": False,
        "hr/#": False,
        "hr/pay": False,
        "hr/notices": True,  # another entry allows it
        "$SYS/x/y": False,
        "$SYS/broker/#": True,
    }
    assert {topic_filter: ann.may_subscribe(topic_filter) for topic_filter in asked} == asked
    received = {"a": True, "test/nosubscribe": False, "hr": False, "hr/pay/ann": False, "hr/notices": True}
    assert {topic: ann.may_receive(topic) for topic in received} == received
    assert ann.may_publish("plant/ann/flow")
    assert not ann.may_publish("plant/ann/setpoint")
    assert not ann.may_publish("plant/ben/flow")
    assert ann.may_pass_first("a")
    assert not ann.may_pass_first("bulk/a")


def test_permissions_are_shared_unless_a_placeholder_distinguishes_principals() -> None:
    plain = parse_policy(STORE.replace(', "own/{principal.clientId}/*"', ""))
    assert plain.permissions(Principal("a")) is plain.permissions(Principal("b"))
    personal = parse_policy(STORE)
    assert personal.permissions(Principal("a")) is not personal.permissions(Principal("b"))


def test_the_cache_of_decisions_is_bounded() -> None:
    permissions = permissions_of(
        "rules: [{principals: {clientIds: ['*']}, brokerResources: [{method: Publish, topics: ['a/#']}]}]",
        Principal("c"),
    )
    for n in range(3 * DECISIONS_KEPT):
        assert permissions.may_publish(f"a/{n}")
        assert not permissions.may_write(b"%d" % n)
    assert permissions.may_publish("a/" + "x" * 5000)
    assert len(permissions._published) <= DECISIONS_KEPT
    assert len(permissions._writes) <= DECISIONS_KEPT
    assert all(len(topic) < 5000 for topic in permissions._published)

"""The policy file: what is refused, and where the error points."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.security.policy import Principal
from penstock.security.policy_file import load_policy, parse_policy


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("rules:\n  - principals: {}\n", "p:2:17", "clientIds: ['*']"),
        ("rules:\n  - principals: {clientId: [a]}\n", "p:2:18", "did you mean 'clientIds'"),
        ("rules:\n  - brokerResources: []\n", "p:2:5", "is missing"),
        (
            "rules:\n  - principals: {usernames: [a]}\n    brokerResources:\n      - {method: Pubish, topics: [a]}\n",
            "p:4:18",
            "did you mean 'Publish'",
        ),
        (
            "rules:\n  - principals: {usernames: [a]}\n    brokerResources:\n      - {method: Publish}\n",
            "p:4:9",
            "all of them are `topics: ['#']`",
        ),
        (
            "rules:\n  - principals: {usernames: [a]}\n    brokerResources: [{method: Connect, topics: [a]}]\n",
            "p:3:23",
            "Connect takes `clientIds`",
        ),
        (
            "rules:\n  - principals: {usernames: [a]}\n    brokerResources: [{method: Publish, exceptTopics: [a]}]\n",
            "p:3:23",
            "Publish needs `topics`",
        ),
        (
            (
                "rules:\n  - principals: {usernames: [a]}\n"
                "    brokerResources: [{method: Publish, topics: [a], exceptTopics: ['{user}']}]\n"
            ),
            "p:3:23",
            "without placeholders",
        ),
        (
            "rules:\n  - principals: {usernames: [a]}\n    brokerResources: [{method: Subscribe, topics: ['a/#/b']}]\n",
            "p:3:52",
            "# the last one",
        ),
        (
            "rules:\n- principals: {groups: [a]}\n  stateStoreResources: [{method: Read, keys: [x], keyType: Binary}]",
            "p:3:25",
            "expected base64",
        ),
        (
            "rules:\n  - principals: {usernames: [a]}\n    stateStoreResources: [{method: Read, keys: ['[a']}]\n",
            "p:3:27",
            "expected a ] after [",
        ),
        ("rules:\n  - principals: {attributes: [{}]}\n", "p:2:17", "at least one attribute"),
        ("rule: []\n", "p:1:1", "did you mean 'rules'"),
    ],
)
def test_errors_point_at_the_place(text: str, where: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, "p")
    assert str(caught.value).startswith(where), str(caught.value)
    assert words in str(caught.value)


def test_the_published_shape_works_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text("""
rules:
  - principals:
      clientIds: ["temperature-sensor", "humidity-sensor"]
      attributes:
        - {city: "seattle", organization: "contoso"}
    brokerResources:
      - method: Connect
      - method: Publish
        topics: ["/telemetry/{principal.clientId}", "/telemetry/{principal.attributes.organization}"]
      - method: Subscribe
        topics: ["/commands/{principal.attributes.organization}"]
    stateStoreResources:
      - method: ReadWrite
        keyType: Pattern
        keys: ["*"]
""")
    policy = load_policy(path)
    sensor = policy.permissions(Principal("temperature-sensor"))
    assert sensor.may_publish("/telemetry/temperature-sensor")
    assert not sensor.may_publish("/telemetry/humidity-sensor")
    contoso = policy.permissions(Principal("x", attributes={"city": "seattle", "organization": "contoso", "n": "1"}))
    assert contoso.may_subscribe("/commands/contoso")
    assert contoso.may_write(b"anything")
    assert not policy.permissions(Principal("x", attributes={"city": "seattle"})).may_connect("x")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "none.yaml")

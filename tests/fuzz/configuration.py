"""Targets of the files that operators write: node, pipelines, policies, tokens. Errors are ConfigErrors."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.node.config.node import NodeConfig
from penstock.pipelines.spec import loader
from penstock.runtime.config.loader import parse
from penstock.security.policy import Principal
from penstock.security.policy_file import parse_policy
from penstock.security.tokens import parse_tokens

ENVIRONMENT = {"A": "1", "PASSWORD": "secret"}
MOST = 8192


def _text(data: bytes) -> str:
    return data[:MOST].decode("utf-8", "replace")


def fuzz_node(data: bytes) -> object:
    """The text of a node's configuration."""
    try:
        return repr(parse(_text(data), NodeConfig, name="node.yaml", environment=ENVIRONMENT))
    except ConfigError as error:
        return str(error)


def fuzz_pipeline(data: bytes) -> object:
    """The text of a pipeline."""
    try:
        return repr(loader.parse(_text(data), name="pipeline.yaml", environment=ENVIRONMENT))
    except ConfigError as error:
        return str(error)


def fuzz_policies(data: bytes) -> object:
    """The text of a policy file, whose permissions are then asked, and of a token file."""
    outcome: list[object] = []
    try:
        policy = parse_policy(_text(data))
        principal = policy.describe(Principal("client", user="user"))
        permissions = policy.permissions(principal)
        for topic in ("a", "a/b", "$SYS/x", "client/a", ""):
            outcome.append((permissions.may_publish(topic), permissions.may_receive(topic)))
            outcome.append((permissions.may_subscribe(topic or "#"), permissions.may_connect(topic)))
            key = topic.encode()
            outcome.append((permissions.may_read(key), permissions.may_write(key)))
            outcome.append((permissions.may_produce(topic), permissions.may_consume(topic, "g")))
    except ConfigError as error:
        outcome.append(str(error))
    try:
        outcome.append(len(parse_tokens(_text(data))))
    except ConfigError as error:
        outcome.append(str(error))
    return outcome

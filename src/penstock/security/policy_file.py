"""The policy file: rules as YAML, in the format of Azure IoT Operations' BrokerAuthorization.

``rules`` of that resource work here unchanged. Extensions: ``groups``, ``certificates`` and ``anonymous`` as
principals, patterns instead of plain names, the methods ``HighPriority`` and ``ObserveRequests``, the short
placeholders ``{clientId}`` and ``{user}``, and ``users`` and ``certificates`` with groups and attributes.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from penstock.runtime.config.loader import load, parse
from penstock.security.policy import (
    ClientAttributes,
    Consumption,
    GlobPattern,
    Grants,
    Policy,
    PolicyStatement,
    Subjects,
    TopicPattern,
)

__all__ = [
    "BrokerResource",
    "IdentityAttributes",
    "PolicyFile",
    "PolicyRule",
    "Principals",
    "StateStoreResource",
    "TubeResource",
    "load_policy",
    "parse_policy",
]

_log = logging.getLogger("penstock.security")
T = TypeVar("T")


def _reader(make: Callable[[str], T], kind: type[T]) -> Callable[[object], T]:
    def read(value: object) -> T:
        if isinstance(value, kind):
            return value
        if not isinstance(value, str):
            raise ValueError("expected text (quote a value that looks like a number)")
        return make(value)

    return read


def _spelled(*names: str) -> BeforeValidator:
    """Case-insensitive names, as in BrokerAuthorization."""
    by_lower = {name.lower(): name for name in names}
    return BeforeValidator(lambda value: by_lower.get(value.lower(), value) if isinstance(value, str) else value)


TopicText = Annotated[
    TopicPattern,
    PlainValidator(_reader(TopicPattern, TopicPattern), json_schema_input_type=str),
    PlainSerializer(lambda pattern: pattern.text, return_type=str),
]
GlobText = Annotated[
    GlobPattern,
    PlainValidator(_reader(GlobPattern, GlobPattern), json_schema_input_type=str),
    PlainSerializer(lambda glob: glob.text, return_type=str),
]
BrokerMethod = Annotated[
    Literal["Connect", "Publish", "Subscribe", "HighPriority", "ObserveRequests"],
    _spelled("Connect", "Publish", "Subscribe", "HighPriority", "ObserveRequests"),
]
StoreMethod = Annotated[Literal["Read", "Write", "ReadWrite"], _spelled("Read", "Write", "ReadWrite")]
TubeMethod = Annotated[Literal["Produce", "Consume", "Administer"], _spelled("Produce", "Consume", "Administer")]
KeyType = Annotated[Literal["Pattern", "String", "Binary"], _spelled("Pattern", "String", "Binary")]


class _PolicySection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Principals(_PolicySection):
    """Subjects of a rule: clients in one of these lists."""

    anonymous: bool = Field(default=False, description="clients without a user or certificate")
    clientIds: list[GlobText] = Field(
        default_factory=list, description="client identifiers; `*` is every client, anonymous ones included"
    )
    usernames: list[GlobText] = Field(default_factory=list, description="authenticated users")
    certificates: list[GlobText] = Field(default_factory=list, description="names in client certificates")
    groups: list[str] = Field(default_factory=list, description="groups, as set by `users` or `certificates`")
    attributes: list[dict[str, str]] = Field(
        default_factory=list, description="attributes; a client needs all those of one of the mappings"
    )

    @model_validator(mode="after")
    def _check_principals(self) -> Principals:
        if not any((self.anonymous, self.clientIds, self.usernames, self.certificates, self.groups, self.attributes)):
            raise ValueError(
                "expected at least one list that is not empty, or `anonymous: true`; `clientIds: ['*']` is every client"
            )
        if any(not wanted for wanted in self.attributes):
            raise ValueError("expected at least one attribute in each mapping of `attributes`")
        return self

    def subjects(self) -> Subjects:
        """Subjects for the policy."""
        return Subjects(
            anonymous=self.anonymous,
            client_ids=self.clientIds,
            usernames=self.usernames,
            certificates=self.certificates,
            groups=self.groups,
            attributes=self.attributes,
        )


class BrokerResource(_PolicySection):
    """Permissions of a rule at the MQTT broker."""

    method: BrokerMethod = Field(description="what is allowed")
    clientIds: list[GlobText] = Field(
        default_factory=list, description="Connect: with these client identifiers, default: any"
    )
    topics: list[TopicText] = Field(
        default_factory=list,
        description="Publish, Subscribe: topic filters; HighPriority, ObserveRequests: default any",
    )
    exceptTopics: list[TopicText] = Field(
        default_factory=list, description="topic filters that are left out of `topics`, without placeholders"
    )

    @model_validator(mode="after")
    def _fits(self) -> BrokerResource:
        if self.method in {"Publish", "Subscribe"} and not self.topics:
            raise ValueError(f"{self.method} needs `topics`; all of them are `topics: ['#']`")
        if self.method == "Connect" and (self.topics or self.exceptTopics):
            raise ValueError("Connect takes `clientIds`, not `topics`")
        if any(pattern.personal for pattern in self.exceptTopics):
            raise ValueError("expected `exceptTopics` without placeholders")
        if self.method != "Connect" and self.clientIds:
            raise ValueError(f"{self.method} takes `topics`, not `clientIds`; use `principals` for the subjects")
        return self

    def add_to(self, grants: Grants) -> None:
        """Add these permissions to the ``grants`` of the rule."""
        if self.method == "Connect":
            grants.connect += self.clientIds or [GlobPattern("*")]
            return
        texts = [pattern.text for pattern in self.topics] or ["#"]
        patterns = [TopicPattern(text, self.exceptTopics) for text in texts]
        if self.method == "Publish":
            grants.publish += patterns
        elif self.method == "Subscribe":
            grants.subscribe += patterns
        elif self.method == "ObserveRequests":
            grants.observe_requests += patterns
        else:
            grants.high_priority += patterns


class StateStoreResource(_PolicySection):
    """Permissions of a rule in the state store."""

    method: StoreMethod = Field(description="Read: commands that read keys; Write: commands that change them")
    keyType: KeyType = Field(
        default="Pattern", description="Pattern: a glob with placeholders; String: the key; Binary: the key in base64"
    )
    keys: list[str] = Field(min_length=1, description="the keys")

    @model_validator(mode="after")
    def _readable(self) -> StateStoreResource:
        self.globs()
        return self

    def globs(self) -> list[GlobPattern]:
        """The keys as patterns."""
        return [self._glob(key) for key in self.keys]

    def _glob(self, key: str) -> GlobPattern:
        if self.keyType == "Pattern":
            return GlobPattern(key, keys=True)
        if self.keyType == "Binary":
            try:
                return GlobPattern.exactly(base64.b64decode(key, validate=True))
            except binascii.Error as error:
                raise ValueError(f"expected base64 for keyType Binary, got {key!r}") from error
        return GlobPattern.exactly(key.encode(errors="surrogatepass"))

    def add_to(self, grants: Grants) -> None:
        """Add these permissions to the ``grants`` of the rule."""
        globs = self.globs()
        if self.method != "Write":
            grants.read += globs
        if self.method != "Read":
            grants.write += globs


class TubeResource(_PolicySection):
    """Permissions of a rule in TubeMQ."""

    method: TubeMethod = Field(description="what is allowed")
    topics: list[GlobText] = Field(
        default_factory=list, description="TubeMQ topics; Administer: default `*`, which includes the cluster"
    )
    groups: list[GlobText] = Field(default_factory=list, description="Consume: consumer groups, default any")

    @model_validator(mode="after")
    def _fits(self) -> TubeResource:
        if self.method != "Administer" and not self.topics:
            raise ValueError(f"{self.method} needs `topics`; all of them are `topics: ['*']`")
        if self.method != "Consume" and self.groups:
            raise ValueError(f"{self.method} takes `topics`, not `groups`")
        return self

    def add_to(self, grants: Grants) -> None:
        """Add these permissions to the ``grants`` of the rule."""
        if self.method == "Produce":
            grants.produce += self.topics
        elif self.method == "Administer":
            grants.administer += self.topics or [GlobPattern("*")]
        else:
            groups = self.groups or [GlobPattern("*")]
            grants.consume += [Consumption(topic, group) for topic in self.topics for group in groups]


class PolicyRule(_PolicySection):
    """A rule. Everything that no rule grants is denied."""

    name: str = Field(default="", max_length=128, description="for people")
    principals: Principals = Field(description="whom it is for")
    brokerResources: list[BrokerResource] = Field(default_factory=list, description="permissions at the broker")
    stateStoreResources: list[StateStoreResource] = Field(
        default_factory=list, description="permissions in the state store"
    )

    tubeResources: list[TubeResource] = Field(default_factory=list, description="permissions in TubeMQ")

    def statement(self, unnamed: str) -> PolicyStatement:
        """Statement of the policy; called ``unnamed`` if the rule has no name."""
        grants = Grants()
        for broker_resource in self.brokerResources:
            broker_resource.add_to(grants)
        for store_resource in self.stateStoreResources:
            store_resource.add_to(grants)
        for tube_resource in self.tubeResources:
            tube_resource.add_to(grants)
        return PolicyStatement(self.principals.subjects(), grants, self.name or unnamed)


class IdentityAttributes(_PolicySection):
    """Attributes of a user or a certificate."""

    groups: list[str] = Field(default_factory=list, description="groups it belongs to")
    attributes: dict[str, str] = Field(default_factory=dict, description="attributes, for `principals` and patterns")

    def client_attributes(self) -> ClientAttributes:
        """Attributes for the policy."""
        return ClientAttributes(self.groups, self.attributes)


class PolicyFile(_PolicySection):
    """A policy file. An empty one denies everything."""

    rules: list[PolicyRule] = Field(default_factory=list, description="rules that grant permissions")
    users: dict[str, IdentityAttributes] = Field(default_factory=dict, description="user name to groups and attributes")
    certificates: dict[str, IdentityAttributes] = Field(
        default_factory=dict, description="name in a client certificate to groups and attributes"
    )

    def policy(self) -> Policy:
        """Create the policy."""
        return Policy(
            [rule.statement(f"rule {number}") for number, rule in enumerate(self.rules, start=1)],
            users={name: known.client_attributes() for name, known in self.users.items()},
            certificates={name: known.client_attributes() for name, known in self.certificates.items()},
        )


def load_policy(path: Path) -> Policy:
    """Read the policy file at ``path``; ``${NAME}`` is replaced from the environment. A file without rules is logged.

    Raises:
        ConfigError: it is invalid; the error has file, line and column.
    """
    file = load(path, PolicyFile)
    if not file.rules:
        _log.warning(
            "the policy file has no rules: it denies everything, to every client",
            extra={"fields": {"policies": str(path)}},
        )
    return file.policy()


def parse_policy(text: str, name: str = "policies") -> Policy:
    """Parse a policy file that is already in memory."""
    return parse(text, PolicyFile, name=name).policy()

"""Who a client is and what it may do: the broker's Access over passwords, certificates, tokens, SCRAM and policies.

One :class:`Rulebook` for the whole node holds what the files say now. Each listener has a :class:`Gatekeeper`, with the
ways of authentication that it accepts. A reload puts another rulebook in place and asks again for every client that is
there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.access import Action, Answer, Challenge, Credentials, Granted, Origin, Refused
from penstock.mqtt.engine.access import Principal as Someone
from penstock.mqtt.password_checks import PasswordChecks
from penstock.security import scram
from penstock.security.passwords import Credential
from penstock.security.policy import Permissions, Policy
from penstock.security.principal import ANONYMOUS, Principal
from penstock.security.tokens import METHOD, Token, token_digest, token_of

__all__ = ["Certificate", "Client", "GateStats", "Gatekeeper", "Method", "PartGate", "Rulebook"]

_log = logging.getLogger("penstock.mqtt.access")

_REFUSED: Final = Refused(ReasonCode.NOT_AUTHORIZED)
_BAD_PASSWORD: Final = Refused(ReasonCode.BAD_USER_NAME_OR_PASSWORD)
_BUSY: Final = Refused(ReasonCode.SERVER_BUSY, "too many clients are being checked; come back later")
_BAD_METHOD: Final = Refused(ReasonCode.BAD_AUTHENTICATION_METHOD, "this authentication method is not accepted here")


class Method(StrEnum):
    """A way in which a client may say who it is."""

    ANONYMOUS = "anonymous"
    """It need not; a user name that it gives counts for nothing."""
    PASSWORD = "password"  # noqa: S105 - the name of the method
    """User name and password of CONNECT."""
    CERTIFICATE = "certificate"
    """The client certificate that TLS has verified."""
    SCRAM = "scram"
    """Enhanced authentication by SCRAM-SHA-256: the password does not travel."""
    TOKEN = "token"  # noqa: S105 - the name of the method
    """Enhanced authentication by a bearer token."""


class Rulebook(NamedTuple):
    """What the files say. None: there is no such file; without a policy a client that may come in may do everything."""

    users: Mapping[str, Credential] | None = None
    tokens: Mapping[bytes, Token] | None = None
    policy: Policy | None = None
    token_method: str = METHOD


class Certificate(NamedTuple):
    """What TLS has verified of a client: the name that counts, and the digest of the authority that vouches for it."""

    name: str | None
    anchor: bytes | None


class Client:
    """Who is connected, in the words of the broker, and what may be done by it now."""

    __slots__ = ("credential", "keeper", "name", "permissions", "principal", "proof", "proved")

    def __init__(
        self,
        keeper: Gatekeeper,
        proved: Principal,
        principal: Principal,
        permissions: Permissions | None,
        *,
        credential: Credential | Token | None = None,
        proof: bytes | None = None,
    ) -> None:
        self.keeper = keeper
        self.proved = proved
        """What it proved to be; ``principal`` is that with what the policy knows about it."""
        self.principal = principal
        self.name = principal.name
        self.permissions = permissions
        """None: everything."""
        self.credential = credential
        """The user or the token by which it came in; it counts for as long as the files say the same."""
        self.proof = proof
        """Digest of the token, or of the authority that vouched for its certificate."""

    def become(self, again: Client) -> None:
        """It authenticated again, under the same name: all that hold this object go by what it proved now."""
        self.keeper = again.keeper
        self.proved = again.proved
        self.principal = again.principal
        self.permissions = again.permissions
        self.credential = again.credential
        self.proof = again.proof

    def __repr__(self) -> str:
        return f"<Client {self.principal!r}>"


class GateStats:
    """Counters since the start."""

    __slots__ = ("granted", "refused_busy", "refused_credentials", "refused_method", "refused_policy", "revoked")

    def __init__(self) -> None:
        self.granted = 0
        self.refused_credentials = 0
        """Wrong password, unknown user or token, or none where one is needed."""
        self.refused_method = 0
        """Authentication methods that are not accepted."""
        self.refused_policy = 0
        """Clients that are who they say, and may not connect."""
        self.refused_busy = 0
        """Clients for whose password check there was no room."""
        self.revoked = 0
        """Clients that were disconnected because a reload ended what let them in."""


class Gatekeeper:
    """The Access of one listener.

    ``node_topics``: beginnings of topics on which the node itself sends to one client, which no policy needs to grant.
    """

    def __init__(
        self,
        methods: frozenset[Method],
        rulebook: Rulebook,
        checks: PasswordChecks,
        stats: GateStats,
        *,
        now: Callable[[], int],
        node_topics: tuple[str, ...] = (),
    ) -> None:
        self.methods = methods
        self.rulebook = rulebook
        self._checks = checks
        self._stats = stats
        self._now = now
        self._node_topics = node_topics
        self._secret = secrets.token_bytes(32)

    # The broker's questions

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Judge a CONNECT or a re-authentication [Access]."""
        if credentials.method is not None:
            self._enhanced(credentials, credentials.method, answer, now)
        elif credentials.username is not None and credentials.password is not None and Method.PASSWORD in self.methods:
            self._password(credentials, credentials.username, credentials.password, answer, now)
        elif Method.CERTIFICATE in self.methods and (shown := _certificate(credentials.origin)).name is not None:
            principal = Principal(credentials.client_id, certificate=shown.name)
            self._admit(credentials, principal, answer, now, proof=shown.anchor)
        elif Method.ANONYMOUS in self.methods:
            self._admit(credentials, Principal(credentials.client_id), answer, now)
        else:
            claimed = credentials.username is not None and Method.PASSWORD in self.methods
            self._refuse(credentials, _BAD_PASSWORD if claimed else _REFUSED, answer, now)

    def allowed(self, principal: Someone, action: Action, topic: str, _qos: int, *, retain: bool) -> bool:  # noqa: ARG002 - Access
        """Whether the client may do that [Access]."""
        assert isinstance(principal, Client)
        permissions = principal.permissions
        if permissions is None:
            return action is not Action.OVERHEAR
        if action is Action.PUBLISH:
            return permissions.may_publish(topic)
        if action is Action.SUBSCRIBE:
            return permissions.may_subscribe(topic)
        if action is Action.RECEIVE:
            return topic.startswith(self._node_topics) or permissions.may_receive(topic)
        if action is Action.OVERHEAR:
            return permissions.may_overhear(topic)
        return permissions.may_pass_first(topic)

    # After a reload

    def still_welcome(self, client: Client, anchors: frozenset[bytes] | None) -> bool:
        """Whether what let the client in holds by the rulebook of now; its permissions are brought up to date.

        ``anchors``: digests of the authorities that client certificates are trusted by; None: nobody asks for them.
        """
        rulebook, credential = self.rulebook, client.credential
        principal = client.principal
        if isinstance(credential, Credential):
            known = (rulebook.users or {}).get(credential.name) == credential
            known = known and not self.methods.isdisjoint((Method.PASSWORD, Method.SCRAM))
        elif isinstance(credential, Token):
            known = (rulebook.tokens or {}).get(client.proof or b"") == credential and Method.TOKEN in self.methods
        elif principal.certificate is not None:
            known = client.proof in (anchors or ()) and Method.CERTIFICATE in self.methods
        else:
            known = Method.ANONYMOUS in self.methods
        if not known:
            return False
        self.refresh(client)
        return client.permissions is None or client.permissions.may_connect(principal.client_id)

    def refresh(self, client: Client) -> None:
        """Bring its permissions up to date, also where it is away: what it may not have does not wait for it."""
        client.principal, client.permissions = self._permissions(client.proved)

    # After a restart

    def recall(self, owner: str, client_id: str) -> Client | None:
        """The owner of a session that the disk brought back, as it would be here now; None where it may not come in.

        What is not stored counts as little as can be: of a user with several tokens, what all of them give.
        """
        rulebook = self.rulebook
        kind, _, name = owner.partition(":")
        proved: Principal | None = None
        credential: Credential | Token | None = None
        if kind == "user":
            tokens = [token for token in (rulebook.tokens or {}).values() if token.user == name]
            credential = (rulebook.users or {}).get(name)
            if credential is not None and not self.methods.isdisjoint((Method.PASSWORD, Method.SCRAM)):
                proved = Principal(client_id, user=name)
            elif tokens and Method.TOKEN in self.methods:
                credential = tokens[0]
                groups = frozenset.intersection(*(token.groups for token in tokens))
                common = set.intersection(*(set(token.attributes.items()) for token in tokens))
                proved = Principal(client_id, user=name, groups=groups, attributes=dict(common))
        elif kind == "certificate" and Method.CERTIFICATE in self.methods:
            proved = Principal(client_id, certificate=name)
        elif owner in ("", ANONYMOUS) and Method.ANONYMOUS in self.methods:
            proved = Principal(client_id)
        if proved is None:
            return None
        principal, permissions = self._permissions(proved)
        if permissions is not None and not permissions.may_connect(client_id):
            return None
        return Client(self, proved, principal, permissions, credential=credential)

    # Inside

    def _enhanced(self, credentials: Credentials, method: str, answer: Answer, now: int) -> None:
        data = credentials.data or b""
        if method == scram.METHOD and Method.SCRAM in self.methods:
            users = self.rulebook.users or {}
            exchange = scram.ScramExchange(users, secret=self._secret, nonce=secrets.token_urlsafe(18))
            first = exchange.first(data)
            if first is None:
                self._refuse(credentials, _REFUSED, answer, now)
                return

            def proceed(data: bytes | None, answer: Answer, now: int) -> None:
                final = exchange.final(data or b"")
                user = exchange.user
                if final is None or user is None or (self.rulebook.users or {}).get(user.name) != user:
                    self._refuse(credentials, _REFUSED, answer, now)
                    return
                principal = Principal(credentials.client_id, user=user.name)
                self._admit(credentials, principal, answer, now, credential=user, data=final)

            answer(Challenge(first, proceed), now)
        elif method == self.rulebook.token_method and Method.TOKEN in self.methods:
            token = token_of(self.rulebook.tokens or {}, data)
            if token is None:
                self._refuse(credentials, _REFUSED, answer, now)
                return
            principal = Principal(
                credentials.client_id, user=token.user, groups=token.groups, attributes=token.attributes
            )
            self._admit(credentials, principal, answer, now, credential=token, proof=token_digest(data))
        else:
            self._stats.refused_method += 1
            answer(_BAD_METHOD, now)

    def _password(self, credentials: Credentials, name: str, password: bytes, answer: Answer, now: int) -> None:
        user = (self.rulebook.users or {}).get(name)

        def done(right: bool | None) -> None:  # noqa: FBT001 - a Done
            if right is None:
                self._stats.refused_busy += 1
                answer(_BUSY, self._now())
            elif not right or user is None or (self.rulebook.users or {}).get(name) != user:
                # The last: the user was changed while the check ran.
                self._refuse(credentials, _BAD_PASSWORD, answer, self._now())
            else:
                principal = Principal(
                    credentials.client_id, user=name, certificate=_certificate(credentials.origin).name
                )
                self._admit(credentials, principal, answer, self._now(), credential=user)

        del now
        self._checks.check(credentials.origin.address, name, user, password, done)

    def _admit(
        self,
        credentials: Credentials,
        principal: Principal,
        answer: Answer,
        now: int,
        *,
        credential: Credential | Token | None = None,
        proof: bytes | None = None,
        data: bytes | None = None,
    ) -> None:
        """It is who it says it is; the policy decides whether it may connect."""
        proved = principal
        principal, permissions = self._permissions(proved)
        if permissions is not None and not permissions.may_connect(credentials.client_id):
            self._stats.refused_policy += 1
            _log.info("not allowed to connect: %r from %s", principal, credentials.origin.address)
            answer(_REFUSED, now)
            return
        self._stats.granted += 1
        client = Client(self, proved, principal, permissions, credential=credential, proof=proof)
        previous = credentials.previous
        if isinstance(previous, Client) and previous.name == client.name:
            previous.become(client)
            client = previous
        answer(Granted(client, data), now)

    def _permissions(self, principal: Principal) -> tuple[Principal, Permissions | None]:
        policy = self.rulebook.policy
        if policy is None:
            return principal, None
        principal = policy.describe(principal)
        return principal, policy.permissions(principal)

    def _refuse(self, credentials: Credentials, refused: Refused, answer: Answer, now: int) -> None:
        self._stats.refused_credentials += 1
        _log.info(
            "authentication failed: client %r, user %r, from %s on %s",
            credentials.client_id,
            credentials.username,
            credentials.origin.address,
            credentials.origin.listener,
        )
        answer(refused, now)


class PartGate(Gatekeeper):
    """The Access of a part of the node that acts for a user: nobody authenticates, and the policies hold for it.

    ``part`` is whose its sessions are, so that no client of the network can have them, not even the user's own.
    """

    def __init__(
        self, user: str, part: str, rulebook: Rulebook, checks: PasswordChecks, stats: GateStats, now: Callable[[], int]
    ) -> None:
        super().__init__(frozenset(), rulebook, checks, stats, now=now)
        self._user = user
        self.part = part

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Let the part in [Access]."""
        answer(Granted(self.client(credentials.client_id)), now)

    def client(self, client_id: str) -> Client:
        """The part as a client of the broker."""
        proved = Principal(client_id, user=self._user)
        principal, permissions = self._permissions(proved)
        client = Client(self, proved, principal, permissions)
        client.name = self.part
        return client


def _certificate(origin: Origin) -> Certificate:
    shown = origin.certificate
    return shown if isinstance(shown, Certificate) else Certificate(None, None)

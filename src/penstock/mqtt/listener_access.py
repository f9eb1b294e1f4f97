"""Authentication and authorization of MQTT clients: passwords, certificates, SCRAM, tokens and policies.

:class:`AccessRules` holds the content of the files for the whole node. Each listener has a :class:`ListenerAccess` with
the authentication methods that it accepts. A reload replaces the rules and checks every connected client again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import matches
from penstock.mqtt.engine.model import access
from penstock.mqtt.engine.model.access import Action, Answer, Challenge, Credentials, Granted, Origin, Refused
from penstock.mqtt.password_checks import PasswordChecks
from penstock.security.passwords import SCRAM_METHOD, Credential, ScramExchange
from penstock.security.policy import ANONYMOUS, Permissions, Policy, Principal
from penstock.security.tokens import METHOD, Token, token_digest, token_of

__all__ = [
    "AccessRules",
    "AccessStats",
    "AuthenticatedClient",
    "AuthenticationMethod",
    "Certificate",
    "InProcessAccess",
    "ListenerAccess",
]

_log = logging.getLogger("penstock.mqtt.access")

_REFUSED: Final = Refused(ReasonCode.NOT_AUTHORIZED)
_BAD_PASSWORD: Final = Refused(ReasonCode.BAD_USER_NAME_OR_PASSWORD)
_BUSY: Final = Refused(ReasonCode.SERVER_BUSY, "too many clients are being authenticated; try again later")
_BAD_METHOD: Final = Refused(ReasonCode.BAD_AUTHENTICATION_METHOD, "this authentication method is not accepted here")


class AuthenticationMethod(StrEnum):
    """A method of authentication."""

    ANONYMOUS = "anonymous"
    """No authentication; a user name is ignored."""
    PASSWORD = "password"  # noqa: S105 - the name of the method
    """User name and password of CONNECT."""
    CERTIFICATE = "certificate"
    """The client certificate, verified by TLS."""
    SCRAM = "scram"
    """Enhanced authentication by SCRAM-SHA-256, which does not send the password."""
    TOKEN = "token"  # noqa: S105 - the name of the method
    """Enhanced authentication by a bearer token."""


_OF_USERS: Final = frozenset({AuthenticationMethod.PASSWORD, AuthenticationMethod.SCRAM})
"""Methods with the entries of the user file."""


class AccessRules(NamedTuple):
    """Content of the configured files; None: not configured. Without a policy an authenticated client may do
    everything."""

    users: Mapping[str, Credential] | None = None
    tokens: Mapping[bytes, Token] | None = None
    policy: Policy | None = None
    token_method: str = METHOD
    salt_key: bytes | None = None
    """Key of the salts of unknown users in the user file."""


class Certificate(NamedTuple):
    """A verified client certificate: the configured name in it, and the digest of its authority."""

    name: str | None
    anchor: bytes | None


class AuthenticatedClient:
    """The principal of a connected client and its current permissions."""

    __slots__ = ("access", "credential", "name", "permissions", "principal", "proof", "proved")

    def __init__(
        self,
        access: ListenerAccess,
        proved: Principal,
        principal: Principal,
        permissions: Permissions | None,
        *,
        credential: Credential | Token | None = None,
        proof: bytes | None = None,
    ) -> None:
        self.access = access
        self.proved = proved
        """The authenticated principal; ``principal`` adds groups and attributes of the policy."""
        self.principal = principal
        self.name = principal.name
        self.permissions = permissions
        """None: all actions are permitted."""
        self.credential = credential
        """The user or token that authenticated the client; valid while the files contain the same entry."""
        self.proof = proof
        """Digest of the token, or of the authority of its certificate."""

    def update(self, new: AuthenticatedClient) -> None:
        """Apply the result of a re-authentication under the same name."""
        self.access = new.access
        self.proved = new.proved
        self.principal = new.principal
        self.permissions = new.permissions
        self.credential = new.credential
        self.proof = new.proof

    def __repr__(self) -> str:
        return f"<AuthenticatedClient {self.principal!r}>"


class AccessStats:
    """Counters since the start."""

    __slots__ = ("granted", "refused_busy", "refused_credentials", "refused_method", "refused_policy", "revoked")

    def __init__(self) -> None:
        self.granted = 0
        self.refused_credentials = 0
        """Wrong password, unknown user or token, or missing credentials."""
        self.refused_method = 0
        """Authentication methods that the listener does not accept."""
        self.refused_policy = 0
        """Authenticated clients that the policy does not permit to connect."""
        self.refused_busy = 0
        """Clients refused because too many password checks were waiting."""
        self.revoked = 0
        """Clients disconnected because a reload revoked their credentials or permissions."""


class ListenerAccess:
    """Authentication and authorization of one listener [Access].

    ``node_topics``: filters of topics on which only the node sends, to a single client; no permission is required.
    """

    def __init__(
        self,
        methods: frozenset[AuthenticationMethod],
        access_rules: AccessRules,
        checks: PasswordChecks,
        stats: AccessStats,
        *,
        now: Callable[[], int],
        node_topics: tuple[str, ...] = (),
    ) -> None:
        self.methods = methods
        self.access_rules = access_rules
        self._checks = checks
        self._stats = stats
        self._now = now
        self._node_topics = node_topics
        self._salt_key = secrets.token_bytes(32)
        """For user files without a key."""

    # Called by the broker

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Authenticate a CONNECT or a re-authentication [Access]."""
        if credentials.method is not None:
            self._enhanced(credentials, credentials.method, answer, now)
        elif (
            credentials.username is not None
            and credentials.password is not None
            and AuthenticationMethod.PASSWORD in self.methods
        ):
            self._password(credentials, credentials.username, credentials.password, answer)
        elif (
            AuthenticationMethod.CERTIFICATE in self.methods
            and (shown := _certificate(credentials.origin)).name is not None
        ):
            principal = Principal(credentials.client_id, certificate=shown.name)
            self._authorize(credentials, principal, answer, now, proof=shown.anchor)
        elif AuthenticationMethod.ANONYMOUS in self.methods:
            self._authorize(credentials, Principal(credentials.client_id), answer, now)
        else:
            claimed = credentials.username is not None and AuthenticationMethod.PASSWORD in self.methods
            self._refuse(
                credentials, _BAD_PASSWORD if claimed else _REFUSED, answer, now, self._missing_credentials(credentials)
            )

    def allowed(self, principal: access.Principal, action: Action, topic: str, _qos: int, *, retain: bool) -> bool:  # noqa: ARG002 - Access
        """Whether the client is permitted to do ``action`` [Access]."""
        assert isinstance(principal, AuthenticatedClient)
        permissions = principal.permissions
        if permissions is None:
            return action is not Action.OBSERVE_REQUESTS
        if action is Action.PUBLISH:
            return permissions.may_publish(topic)
        if action is Action.SUBSCRIBE:
            return permissions.may_subscribe(topic)
        if action is Action.RECEIVE:
            return permissions.may_receive(topic) or any(matches(each, topic) for each in self._node_topics)
        if action is Action.OBSERVE_REQUESTS:
            return permissions.may_observe_requests(topic)
        return permissions.may_pass_first(topic)

    # After a reload

    def revalidate(self, client: AuthenticatedClient, anchors: frozenset[bytes] | None) -> bool:
        """Whether the client's credentials are valid under the current rules; updates its permissions.

        ``anchors``: digests of the trusted authorities of client certificates; None: certificates are not requested.
        """
        access_rules, credential = self.access_rules, client.credential
        principal = client.principal
        if isinstance(credential, Credential):
            known = (access_rules.users or {}).get(credential.name) == credential
            known = known and not self.methods.isdisjoint(_OF_USERS)
        elif isinstance(credential, Token):
            known = (access_rules.tokens or {}).get(
                client.proof or b""
            ) == credential and AuthenticationMethod.TOKEN in self.methods
        elif principal.certificate is not None:
            known = client.proof in (anchors or ()) and AuthenticationMethod.CERTIFICATE in self.methods
        else:
            known = AuthenticationMethod.ANONYMOUS in self.methods
        if not known:
            return False
        self.refresh(client)
        return client.permissions is None or client.permissions.may_connect(principal.client_id)

    def refresh(self, client: AuthenticatedClient) -> None:
        """Update a client's permissions, also while it is disconnected: they apply to its queued messages."""
        client.principal, client.permissions = self._permissions(client.proved)

    # After a restart

    def recover_client(self, owner: str, client_id: str) -> AuthenticatedClient | None:
        """Return the owner of a recovered session with its current permissions; None if it may not connect.

        The token of the session is not stored: a user with several tokens gets the permissions that all of them grant.
        """
        access_rules = self.access_rules
        kind, _, name = owner.partition(":")
        proved: Principal | None = None
        credential: Credential | Token | None = None
        if kind == "user":
            tokens = [token for token in (access_rules.tokens or {}).values() if token.user == name]
            credential = (access_rules.users or {}).get(name)
            if credential is not None and not self.methods.isdisjoint(_OF_USERS):
                proved = Principal(client_id, user=name)
            elif tokens and AuthenticationMethod.TOKEN in self.methods:
                credential = tokens[0]
                groups = frozenset.intersection(*(token.groups for token in tokens))
                common = set.intersection(*(set(token.attributes.items()) for token in tokens))
                proved = Principal(client_id, user=name, groups=groups, attributes=dict(common))
        elif kind == "certificate" and AuthenticationMethod.CERTIFICATE in self.methods:
            proved = Principal(client_id, certificate=name)
        elif owner in ("", ANONYMOUS) and AuthenticationMethod.ANONYMOUS in self.methods:
            proved = Principal(client_id)
        if proved is None:
            return None
        principal, permissions = self._permissions(proved)
        if permissions is not None and not permissions.may_connect(client_id):
            return None
        return AuthenticatedClient(self, proved, principal, permissions, credential=credential)

    # Internal

    def _enhanced(self, credentials: Credentials, method: str, answer: Answer, now: int) -> None:
        data = credentials.data or b""
        if method == SCRAM_METHOD and AuthenticationMethod.SCRAM in self.methods:
            users = self.access_rules.users or {}
            exchange = ScramExchange(
                users, secret=self.access_rules.salt_key or self._salt_key, nonce=secrets.token_urlsafe(18)
            )
            first = exchange.first(data)
            if first is None:
                self._refuse(credentials, _REFUSED, answer, now, "invalid first message of SCRAM")
                return

            def proceed(data: bytes | None, answer: Answer, now: int) -> None:
                final = exchange.final(data or b"")
                user = exchange.user
                if final is None or user is None or (self.access_rules.users or {}).get(user.name) != user:
                    why = "unknown user or wrong SCRAM proof"
                    self._refuse(credentials, _REFUSED, answer, now, why, user=exchange.claimed)
                    return
                principal = Principal(credentials.client_id, user=user.name)
                self._authorize(credentials, principal, answer, now, credential=user, data=final)

            answer(Challenge(first, proceed), now)
        elif method == self.access_rules.token_method and AuthenticationMethod.TOKEN in self.methods:
            token = token_of(self.access_rules.tokens or {}, data)
            if token is None:
                self._refuse(credentials, _REFUSED, answer, now, "unknown token")
                return
            principal = Principal(
                credentials.client_id, user=token.user, groups=token.groups, attributes=token.attributes
            )
            self._authorize(credentials, principal, answer, now, credential=token, proof=token_digest(data))
        else:
            self._stats.refused_method += 1
            answer(_BAD_METHOD, now)

    def _password(self, credentials: Credentials, name: str, password: bytes, answer: Answer) -> None:
        user = (self.access_rules.users or {}).get(name)

        def done(right: bool | None) -> None:  # noqa: FBT001 - a Done
            if right is None:
                self._stats.refused_busy += 1
                answer(_BUSY, self._now())
            elif not right or user is None or (self.access_rules.users or {}).get(name) != user:
                # The last condition: the user was changed while the check ran.
                self._refuse(credentials, _BAD_PASSWORD, answer, self._now(), "unknown user or wrong password")
            else:
                principal = Principal(
                    credentials.client_id, user=name, certificate=_certificate(credentials.origin).name
                )
                self._authorize(credentials, principal, answer, self._now(), credential=user)

        credentials.withdraw = self._checks.check(credentials.origin.address, name, user, password, done)

    def _authorize(
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
        """Answer for an authenticated client: the policy decides whether it may connect."""
        proved = principal
        principal, permissions = self._permissions(proved)
        if permissions is not None and not permissions.may_connect(credentials.client_id):
            self._stats.refused_policy += 1
            _log.info(
                "not allowed to connect: client %r, %s, from %s on %s: no rule of the policies permits Connect; "
                "hint: grant it in the policy file, then SIGHUP",
                credentials.client_id,
                _identity(principal),
                credentials.origin.address,
                credentials.origin.listener,
            )
            answer(_REFUSED, now)
            return
        self._stats.granted += 1
        client = AuthenticatedClient(self, proved, principal, permissions, credential=credential, proof=proof)
        previous = credentials.previous
        if isinstance(previous, AuthenticatedClient) and previous.name == client.name:
            previous.update(client)
            client = previous
        answer(Granted(client, data), now)

    def _permissions(self, principal: Principal) -> tuple[Principal, Permissions | None]:
        policy = self.access_rules.policy
        if policy is None:
            return principal, None
        principal = policy.describe(principal)
        return principal, policy.permissions(principal)

    def _missing_credentials(self, credentials: Credentials) -> str:
        """Return the reason for which a client without a user name and password is not authenticated."""
        if AuthenticationMethod.CERTIFICATE in self.methods and credentials.origin.certificate is not None:
            return "its certificate has no name of the kind in the listener's tls.name (default: a common name)"
        return f"no credentials for {', '.join(sorted(self.methods))}"

    def _refuse(
        self,
        credentials: Credentials,
        refused: Refused,
        answer: Answer,
        now: int,
        why: str,
        *,
        user: str | None = None,
    ) -> None:
        self._stats.refused_credentials += 1
        _log.info(
            "authentication failed: client %r, %s, from %s on %s: %s",
            credentials.client_id,
            "no user name" if (name := credentials.username or user) is None else f"user {name!r}",
            credentials.origin.address,
            credentials.origin.listener,
            why,
        )
        answer(refused, now)


class InProcessAccess(ListenerAccess):
    """Authorization of a component of the node that acts for a user: no authentication, the user's policies [Access].

    ``part`` is the owner of its sessions, so that no network client can take them over, not even the user's own.
    """

    def __init__(
        self,
        user: str,
        part: str,
        access_rules: AccessRules,
        checks: PasswordChecks,
        stats: AccessStats,
        now: Callable[[], int],
    ) -> None:
        super().__init__(frozenset(), access_rules, checks, stats, now=now)
        self._user = user
        self.part = part

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Accept the component [Access]."""
        answer(Granted(self.client(credentials.client_id)), now)

    def client(self, client_id: str) -> AuthenticatedClient:
        """Return the component as a client of the broker."""
        proved = Principal(client_id, user=self._user)
        principal, permissions = self._permissions(proved)
        client = AuthenticatedClient(self, proved, principal, permissions)
        client.name = self.part
        return client


def _identity(principal: Principal) -> str:
    """User or certificate of a client as text for logs."""
    if principal.user is not None:
        return f"user {principal.user!r}"
    return "anonymous" if principal.certificate is None else f"certificate {principal.certificate!r}"


def _certificate(origin: Origin) -> Certificate:
    shown = origin.certificate
    return shown if isinstance(shown, Certificate) else Certificate(None, None)

"""Authentication and authorization of MQTT clients: passwords, certificates, SCRAM, tokens and policies.

:class:`AccessRules` holds the content of the files for the whole node. Each listener has a :class:`ListenerAccess` with
the authentication methods that it accepts. A reload replaces the rules and checks every connected client again.

:class:`PasswordChecks` hashes off the event loop: a few checks at a time, in turn by client address. A check
deliberately takes about 20 ms of a core. A flood of CONNECTs with wrong passwords therefore waits in the short queue of
its own address (IPv6: its /64), while other addresses wait for at most one check of each such address. If the
connection of a waiting check ends, the check leaves the queue without computing a hash. Verified passwords are
remembered by a keyed digest, in memory only, so that ten thousand devices that reconnect after a power failure do not
wait for each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import matches
from penstock.mqtt.engine.model.access import Action, Answer, Challenge, Credentials, Granted, Origin, Refused
from penstock.mqtt.engine.model.access import Principal as Someone
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.connection_limits import address_group
from penstock.security.passwords import LONGEST_PASSWORD, SCRAM_METHOD, Credential, ScramExchange, verify_password
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
    "PasswordChecks",
    "check_workers",
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


class AccessRules(NamedTuple):
    """Content of the configured files; None: not configured. Without a policy an authenticated client may do
    everything."""

    users: Mapping[str, Credential] | None = None
    tokens: Mapping[bytes, Token] | None = None
    policy: Policy | None = None
    token_method: str = METHOD


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
        self._secret = secrets.token_bytes(32)

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
            self._password(credentials, credentials.username, credentials.password, answer, now)
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

    def allowed(self, principal: Someone, action: Action, topic: str, _qos: int, *, retain: bool) -> bool:  # noqa: ARG002 - Access
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
            known = known and not self.methods.isdisjoint((AuthenticationMethod.PASSWORD, AuthenticationMethod.SCRAM))
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
            if credential is not None and not self.methods.isdisjoint(
                (AuthenticationMethod.PASSWORD, AuthenticationMethod.SCRAM)
            ):
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
            exchange = ScramExchange(users, secret=self._secret, nonce=secrets.token_urlsafe(18))
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

    def _password(self, credentials: Credentials, name: str, password: bytes, answer: Answer, now: int) -> None:
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

        del now
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


MAX_WORKERS: Final = 2
"""Maximum number of concurrent checks; each uses a core and 19 MiB."""
REMEMBERED: Final = 20_000
"""Maximum number of remembered verified passwords."""

Done = Callable[[bool | None], None]
"""Called in the loop's thread with the result; None if the password could not be checked: a queue is full, there is no
memory, or the checks were closed."""


def check_workers(cores: int) -> int:
    """Number of concurrent checks: one core less than the process may use, because the event loop uses one; at least
    one."""
    return max(1, min(MAX_WORKERS, cores - 1))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _PasswordCheck:
    """A password check that waits or runs; compared by identity."""

    __slots__ = ("credential", "digest", "done", "group", "password")

    def __init__(self, group: str, credential: Credential | None, password: bytes, digest: bytes, done: Done) -> None:
        self.group = group
        self.credential = credential
        self.password = password
        self.digest = digest
        self.done = done


class PasswordChecks:
    """Checks passwords in threads. Call all methods in the loop's thread.

    ``limits``: read at each check, so that a reload changes them. ``workers``: concurrent checks.
    """

    def __init__(self, limits: BrokerLimits | None = None, *, workers: int | None = None) -> None:
        self._limits = limits or BrokerLimits()
        self.workers = check_workers(_cores()) if workers is None else workers
        self._running = 0
        self._waiting: OrderedDict[str, deque[_PasswordCheck]] = OrderedDict()
        self._count = 0
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, Credential] = OrderedDict()
        self.hashed = 0
        """Checks that computed a hash."""
        self.remembered = 0
        """Checks that were answered from remembered passwords."""
        self.refused = 0
        """Checks that were refused because a queue was full."""
        self.withdrawn = 0
        """Checks that were dropped while they waited, because their connection had ended."""

    @property
    def waiting(self) -> int:
        """The number of waiting checks."""
        return self._count

    def check(
        self, address: str, name: str, credential: Credential | None, password: bytes, done: Done
    ) -> Callable[[], None] | None:
        """Check a password; ``credential`` None: unknown user. ``done`` may be called before this returns.

        Returns a function that withdraws the waiting check, so that ``done`` is not called; None if ``done`` was
        called.
        """
        if len(password) > LONGEST_PASSWORD:
            done(False)  # noqa: FBT003 - no user has it, and it must not fill the queue
            return None
        digest = hashlib.blake2b(b"%d:%b%b" % (len(name), name.encode(), password), key=self._key).digest()
        if credential is not None and self._right.get(digest) == credential:
            self._right.move_to_end(digest)
            self.remembered += 1
            done(True)  # noqa: FBT003 - whether it is right
            return None
        limits, group = self._limits, address_group(address)
        queue = self._waiting.get(group)
        if (
            self._closed
            or self._count >= limits.max_pending_passwords
            or (queue is not None and len(queue) >= limits.max_pending_passwords_per_address)
        ):
            self.refused += 1
            done(None)
            return None
        if queue is None:
            queue = self._waiting[group] = deque()
        check = _PasswordCheck(group, credential, password, digest, done)
        queue.append(check)
        self._count += 1
        self._start_checks()
        return partial(self._withdraw, check)

    def close(self) -> None:
        """Stop the threads. The result of waiting and later checks is None."""
        self._closed = True
        waiting = [check for queue in self._waiting.values() for check in queue]
        self._waiting.clear()
        self._count = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for check in waiting:
            check.done(None)

    def _withdraw(self, check: _PasswordCheck) -> None:
        """Drop a waiting check; a running one completes, and a correct password is remembered."""
        queue = self._waiting.get(check.group)
        if queue is not None and check in queue:
            queue.remove(check)
            self._count -= 1
            self.withdrawn += 1
            if not queue:
                del self._waiting[check.group]
        check.done = _ignore_result

    def _start_checks(self) -> None:
        while self._running < self.workers and self._waiting:
            group, queue = self._waiting.popitem(last=False)
            check = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[group] = queue  # at the end of the queue: other addresses are next
            self._running += 1
            self.hashed += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="password")
            future = asyncio.get_running_loop().run_in_executor(
                self._pool, verify_password, check.credential, check.password
            )
            future.add_done_callback(partial(self._check_done, check))

    def _check_done(self, check: _PasswordCheck, future: asyncio.Future[bool]) -> None:
        self._running -= 1
        if future.cancelled():
            check.done(None)
            return
        error = future.exception()
        if error is not None:
            _log.error("a password could not be checked: %r", error)
            self.refused += 1
            self._start_checks()
            check.done(None)
            return
        right = future.result()
        if right and check.credential is not None:
            self._right[check.digest] = check.credential
            if len(self._right) > REMEMBERED:
                self._right.popitem(last=False)
        check.done(right)
        self._start_checks()


def _ignore_result(_right: bool | None) -> None:  # noqa: FBT001 - a Done
    """Ignore the result of a withdrawn check."""

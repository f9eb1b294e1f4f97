"""Checks of every request to a broker (authentication, rights, state of the broker), and the broker's responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.errors import StorageError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import encode_response
from penstock.tube.codec.proto.shared_pb2 import AuthorizedInfo
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.sessions import RequestContext, SessionOrigins

__all__ = ["LATER", "OK", "BrokerResponse", "Refusal", "RequestChecks", "make_response"]

OK = "OK!"
_MAX_CLIENT_ID = 1024
_TOKENS_KEPT = 6


class BrokerResponse:
    """The body of a response frame, in ``parts``. ``wait``: it is sent after the commit of all earlier changes.

    ``one_block``: the client accepts a frame of one long block.
    """

    __slots__ = ("one_block", "parts", "wait")

    def __init__(self, *parts: bytes, wait: bool = False, one_block: bool = False) -> None:
        self.parts = parts
        self.wait = wait
        self.one_block = one_block

    @property
    def body(self) -> bytes:
        """The parts, joined."""
        return b"".join(self.parts)


LATER = BrokerResponse(b"")
"""Placeholder of a response that is sent later."""


class Refusal(NamedTuple):
    """An error code of the protocol and its text."""

    code: int
    text: str


class RequestChecks:
    """Access and state of the broker. ``refused`` counts rejected requests."""

    def __init__(self) -> None:
        self.access: ClientAccess | None = None
        """Users and rights; None: clients do not authenticate."""
        self.origins = SessionOrigins()
        self.read_stopped = False
        self.write_stopped = False
        self.failure: StorageError | None = None
        """The error of a failed commit, set by the shell; no message is acknowledged afterwards."""
        self.out_of_space = ""
        """Reason why messages are refused for lack of disk space; empty: they are accepted."""
        self.tokens: list[int] = []
        self.check_tokens = False
        self.refused = 0

    def refuse_writer(
        self, context: RequestContext, client_id: str, token: int, user_token: str, topics: Iterable[str]
    ) -> Refusal | None:
        """Return the reason why the client may not produce to ``topics``, if any."""
        if self.failure is not None:
            return Refusal(
                ErrCode.SERVICE_UNAVAILABLE, f"the broker does not store messages any more: {self.failure.what}"
            )
        if self.write_stopped:
            return Refusal(ErrCode.SERVICE_UNAVAILABLE, "writing is stopped on this broker")
        access = self.access
        if access is not None:
            user = access.admit_token(user_token, context.peer, None, context.now_ms)
            if user is None:
                return _UNKNOWN_USER
            for topic in topics:
                if not access.may_produce(user, topic):
                    return Refusal(ErrCode.FORBIDDEN, f"{_describe_user(user)} may not produce to topic {topic}")
        return self._refuse_token(token) or _refuse_client(client_id)

    def refuse_member(
        self, context: RequestContext, client_id: str, group: str, auth: AuthorizedInfo, topic: str | None = None
    ) -> Refusal | None:
        """Return the reason why the consumer may not register for partitions (of ``topic``), if any."""
        refusal = self._refuse_user(context, auth.authAuthorizedToken, group)
        if refusal is None and topic is not None:
            refusal = self._refuse_topic(context, auth.authAuthorizedToken, group, topic, group)
        return refusal or self.refuse_reader(auth.visitAuthorizedToken, client_id)

    def user_of(self, context: RequestContext, user_token: str, group: str) -> str:
        """Return the user of a client that passed the checks."""
        if self.access is None:
            return ""
        return self.access.admit_token(user_token, context.peer, group, context.now_ms) or ""

    def refuse_reader(self, token: int | None, client_id: str) -> Refusal | None:
        """Return the reason why the client may not read, if any. ``token`` None: the request has none (get and
        commit)."""
        if self.read_stopped:
            return Refusal(ErrCode.SERVICE_UNAVAILABLE, "reading is stopped on this broker")
        refusal = None if token is None else self._refuse_token(token)
        return refusal or _refuse_client(client_id)

    def refuse_range_reader(
        self, context: RequestContext, client_id: str, group: str, user_token: str, topic: str
    ) -> Refusal | None:
        """Return the reason why the client may not read ranges, if any. Ranges need no registration and change no
        offset."""
        return (
            self._refuse_user(context, user_token, group)
            or self._refuse_topic(context, user_token, group, topic, None)
            or self.refuse_reader(None, client_id)
        )

    def _refuse_user(self, context: RequestContext, user_token: str, group: str) -> Refusal | None:
        access = self.access
        if access is not None and access.admit_token(user_token, context.peer, group, context.now_ms) is None:
            return _UNKNOWN_USER
        return None

    def _refuse_topic(
        self, context: RequestContext, user_token: str, group: str, topic: str, reads_as: str | None
    ) -> Refusal | None:
        access, user = self.access, self.user_of(context, user_token, group)
        if access is None or access.may_consume(user, topic, reads_as):
            return None
        how = "" if reads_as is None else f" as group {reads_as}"
        return Refusal(ErrCode.CONSUME_GROUP_FORBIDDEN, f"{_describe_user(user)} may not consume topic {topic}{how}")

    def _refuse_token(self, token: int) -> Refusal | None:
        if self.check_tokens and token not in self.tokens:
            return Refusal(ErrCode.CERTIFICATE_FAILURE, "the visit token is unknown or expired")
        return None

    def add_tokens(self, tokens: Iterable[int]) -> None:
        """Add visit tokens of the master; the last six are valid."""
        for token in tokens:
            if token in self.tokens:
                self.tokens.remove(token)
            self.tokens.append(token)
        del self.tokens[:-_TOKENS_KEPT]


_UNKNOWN_USER = Refusal(ErrCode.CERTIFICATE_FAILURE, "authentication failed: no valid token of a user")


def _describe_user(user: str) -> str:
    return f"user {user}" if user else "an anonymous client"


def make_response(method: int, payload: bytes, *, wait: bool = False) -> BrokerResponse:
    """Return the response to ``method`` with an encoded message of the protocol, which contains the error code."""
    return BrokerResponse(encode_response(method, payload), wait=wait)


def _refuse_client(client_id: str) -> Refusal | None:
    if not client_id.strip() or len(client_id) > _MAX_CLIENT_ID:
        return Refusal(ErrCode.BAD_REQUEST, f"clientId is blank or longer than {_MAX_CLIENT_ID}")
    return None

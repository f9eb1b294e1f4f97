"""TLS context of a server: a failed handshake sends the alert that tells the client why [RFC 8446 section 6.2].

The TLS protocols of asyncio and uvloop drop what OpenSSL wrote when the handshake fails, so the client sees a closed
connection without a reason. Both send pending bytes when the handshake wants more data. The handshake object of this
context therefore reports a failure as "more data wanted": the alert is sent, further bytes are discarded, and the
connection ends when the client closes it or the handshake timeout of the listener expires. Closing at once instead
would reset the connection while the client still sends, and a reset discards an alert that was not read yet.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

__all__ = ["HANDSHAKE_FAILED", "AlertingContext", "handshake_failure"]

HANDSHAKE_FAILED: Final[ContextVar[Callable[[ssl.SSLError], None] | None]] = ContextVar(
    "handshake_failed", default=None
)
"""Called with the reason when a connection's handshake fails; set it in the context that accepts the connection."""

_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""Failures of peers that do not speak TLS: an alert would be garbage to them."""


def handshake_failure(error: Exception) -> str:
    """Reason of a failed handshake, for the server's log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client certificate was rejected: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client sent no certificate"
    return str(error) or "the peer left during the handshake"


class _Handshake(ssl.SSLObject):
    """A connection's TLS state whose handshake leaves time to send the alert."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    failed: bool = False
    notify: Callable[[ssl.SSLError], None] | None = None

    def do_handshake(self) -> None:
        """Continue the handshake; after a failure, discard what the client sends."""
        if not self.failed:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                if error.reason in _NOT_TLS or not self.outgoing.pending:
                    raise
                self.failed = True
                if self.notify is not None:
                    self.notify(error)
            else:
                return
        self.incoming.read()
        raise ssl.SSLWantReadError("the handshake failed, and the client was sent an alert")


class AlertingContext(ssl.SSLContext):
    """A server's context whose connections send an alert when the handshake fails."""

    sslobject_class = _Handshake

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - the signature of ssl
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """The TLS state of one connection, for an event loop."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _Handshake)
        made.incoming, made.outgoing = incoming, outgoing
        made.notify = HANDSHAKE_FAILED.get()
        return made

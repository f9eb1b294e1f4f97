"""Errors of an MQTT client, with their causes and hints."""

from __future__ import annotations

from typing import Final

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.codec.packets import ConnAck
from penstock.mqtt.codec.reasons import ReasonCode, reason_name
from penstock.mqtt.engine.client.events import Closed
from penstock.mqtt.url import BrokerUrl
from penstock.runtime.io.network import connection_failure, tls_alert_failure

__all__ = [
    "abandoned",
    "closed",
    "connect_refused",
    "denied",
    "http_server",
    "lost",
    "no_answer",
    "not_connected",
    "refused",
    "rejected",
    "tls_server",
]

_TRANSIENT: Final = frozenset(
    (
        ReasonCode.SERVER_UNAVAILABLE,
        ReasonCode.SERVER_BUSY,
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.CONNECTION_RATE_EXCEEDED,
        # Temporary: behind a load balancer, the next connection is to the active node.
        ReasonCode.USE_ANOTHER_SERVER,
    )
)
"""Reason codes of CONNACK after which the client connects again."""

_CONNECT_HINTS: Final[dict[int, str]] = {
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: "check the user name and the password",
    ReasonCode.NOT_AUTHORIZED: "ask the server's operator to authorize this client, or use other credentials",
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: "choose another client identifier",
    ReasonCode.BAD_AUTHENTICATION_METHOD: "use a method of enhanced authentication that this server supports",
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: "this client requires MQTT 5: connect to a server that supports it",
    ReasonCode.BANNED: "ask the server's operator",
    ReasonCode.QUOTA_EXCEEDED: "try again later, or raise the server's limits",
    ReasonCode.PACKET_TOO_LARGE: "shorten the will and the user properties of CONNECT",
}

_START: Final = "start a node (penstock up), or correct the address"


def not_connected(url: BrokerUrl, error: OSError, certificate: str | None = None) -> UnavailableError:
    """Error: the server is not reachable. ``certificate`` is the file of the client certificate."""
    said = connection_failure(error, url.host, tls=url.tls, certificate=certificate)
    return UnavailableError(f"mqtt: no connection to {url}", applied=False, why=said.why, hint=said.hint or _START)


def no_answer(url: BrokerUrl, seconds: float) -> UnavailableError:
    """Error: the server accepted the connection and sent no CONNACK."""
    return UnavailableError(
        f"mqtt: {url} does not answer CONNECT",
        applied=False,
        why=f"no CONNACK within {seconds:g} s",
        hint="check that this port speaks MQTT"
        if url.tls
        else f"check that this port speaks MQTT; if it uses TLS, connect to {_with_tls(url)}",
    )


def rejected(url: BrokerUrl, error: Exception | None, certificate: str | None) -> UnavailableError | None:
    """Error: the server closed the connection with the TLS alert in ``error``; None if ``error`` is not an alert."""
    said = tls_alert_failure(error, certificate)
    return None if said is None else UnavailableError(f"mqtt: no connection to {url}", why=said.why, hint=said.hint)


def http_server(url: BrokerUrl, data: bytes) -> UnavailableError:
    """Error: the server answered CONNECT with the HTTP response in ``data``."""
    status = data.partition(b"\r\n")[0][:80].decode("latin-1")
    return UnavailableError(
        f"mqtt: {url} does not speak MQTT",
        applied=False,
        why=f"it answered CONNECT with HTTP: {status!r}",
        hint="use the address of the MQTT listener (port 1883 by default) instead of the HTTP listener",
    )


def lost(url: BrokerUrl, *, accepted: bool) -> UnavailableError:
    """Error: the connection was closed without DISCONNECT."""
    if accepted:
        return UnavailableError(f"mqtt: the connection to {url} was lost")
    if url.tls:
        other, check = "requires a client certificate", "check that this port speaks MQTT 5, and the client certificate"
    else:
        other, check = "uses TLS", f"check that this port speaks MQTT 5; if it uses TLS, connect to {_with_tls(url)}"
    return UnavailableError(
        f"mqtt: {url} closed the connection instead of answering CONNECT",
        applied=False,
        why=f"it stops or restarts, {other}, or does not speak MQTT",
        hint=f"try again; if it repeats, {check}",
    )


def tls_server(url: BrokerUrl) -> UnavailableError:
    """Error: the server answered CONNECT with a TLS record."""
    return UnavailableError(
        f"mqtt: {url} does not speak MQTT without TLS",
        applied=False,
        why="it answered CONNECT with a TLS alert",
        hint=f"connect to {_with_tls(url)}",
    )


def _with_tls(url: BrokerUrl) -> str:
    return f"{'wss' if url.websocket else 'mqtts'}://{url.authority}{url.path}"


def denied(url: BrokerUrl, what: str, permission: str, topic: str, code: int, text: str) -> RefusedError:
    """Error: the server refused ``what``, for which the policies of a node must grant ``permission`` on ``topic``."""
    error = refused(url, what, code, text)
    if code == ReasonCode.NOT_AUTHORIZED:
        error.needs_grant = True
        error.hint = f"grant {permission} on {topic!r} to this client in the policy file of the server, then SIGHUP"
    return error


def refused(url: BrokerUrl, what: str, code: int, text: str, hint: str | None = None) -> RefusedError:
    """Error: the server refused ``what``."""
    return RefusedError(
        f"mqtt: {url} refused {what}: {reason_name(code)}",
        code=code,
        text=text,
        peer=str(url),
        why=text or None,
        hint=hint,
    )


def connect_refused(url: BrokerUrl, packet: ConnAck) -> RefusedError:
    """Error: the server refused CONNECT."""
    properties = packet.properties
    hint = _CONNECT_HINTS.get(packet.reason_code)
    if properties.server_reference is not None:
        hint = f"connect to {properties.server_reference}, to which the server redirects"
    error = refused(url, "CONNECT", packet.reason_code, properties.reason_string or "", hint)
    error.retriable = packet.reason_code in _TRANSIENT
    return error


def closed(url: BrokerUrl, event: Closed, client_id: str) -> PenstockError:
    """Error: the server sent DISCONNECT, or the client closed the connection because of an error."""
    if event.error is not None:
        return event.error
    who = "the server" if event.by_server else "the client"
    what = f"mqtt: {who} closed the connection to {url}: {reason_name(event.reason_code)}"
    if event.by_server and event.reason_code == ReasonCode.SESSION_TAKEN_OVER:
        return RefusedError(  # reconnecting would disconnect the other client, which would reconnect
            what,
            code=event.reason_code,
            text=event.reason_string,
            peer=str(url),
            why=f"another client connected with the client identifier {client_id!r}",
            hint="give each client its own client identifier",
        )
    reference = event.server_reference
    return UnavailableError(
        what, why=event.reason_string or None, hint=None if reference is None else f"connect to {reference}"
    )


def abandoned(cause: PenstockError | None, *, sent: bool) -> UnavailableError:
    """Error: an operation was not answered before the client closed. ``sent``: the server may have received it."""
    return UnavailableError(
        "mqtt: the client was closed before the operation was answered",
        applied=None if sent else False,
        why=cause.what if cause is not None else "disconnect() was called",
    )

"""Requests of a state store client: timestamps, correlation of responses, and errors.

Each request carries a hybrid logical clock value greater than all values that the client sent or received. The store
rejects a value that is more than a minute ahead of its own clock; values behind it are accepted. With ``server_clock``
the timestamps contain no time of this machine: they follow the newest version received from the store, which preserves
causal order and is never ahead of the store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Final

from penstock.errors import LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.statestore.binding import request
from penstock.statestore.codec.commands import COMMANDS, Verb
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import decode_reply
from penstock.statestore.errors import NoStateStoreError, as_text, refusal, status_refusal
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc, parse

__all__ = ["RequestClock", "RequestSender", "checked_timeout"]

_log = logging.getLogger("penstock.statestore")

_TIMED_OUT: Final = "408"
"""Status of a request that may have been executed."""
_READS: Final = frozenset(verb.value.encode() for verb, spec in COMMANDS.items() if not spec.checks_fence)
"""Commands that may be executed twice: they change no key."""
_WITH_VALUE: Final = frozenset(("SET", "VDEL"))
"""Commands with a value, which may be too large."""
_LOST_SESSION: Final = "the connection was lost, and the broker has no session in which it would keep the answer"
_READ_FIRST: Final = "read the key to see whether the request was executed, then repeat it"
_WARN_AGAIN_MS: Final = 3_600_000
"""Interval of reports of a wrong clock, in ms."""


_LONGEST_TIMEOUT_S: Final = 0xFFFFFFFF
"""The largest Message Expiry Interval, which a request has for the same time."""


def checked_timeout(timeout_s: float) -> float:
    """Return ``timeout_s``. Raises LocalProtocolError if it is not a number of seconds that a request can wait."""
    given: object = timeout_s
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise LocalProtocolError(
            f"state store: timeout_s is {timeout_s!r:.60}",
            hint="give a number of seconds above 0, or omit it for the default of the client",
        )
    return timeout_s


class RequestClock:
    """The clock of one client. ``wall_ms``: the machine's clock; ``node``: the client's id in clock values."""

    def __init__(self, node: str, wall_ms: Callable[[], int], *, server_clock: bool = False) -> None:
        self._wall_ms = wall_ms
        self._server_clock = server_clock
        self._value = Hlc(0, 0, node)
        self._newest: Hlc | None = None
        """The newest version received from the store."""
        self._newest_at = 0
        self._warned_at: int | None = None

    @property
    def behind_ms(self) -> int | None:
        """Lead of the newest received version over this machine's clock, in ms; None: none received.

        This is a lower bound of the lead of the clock of the store, or of another client. A negative value gives no
        information, because a version may be old.
        """
        return None if self._newest is None else self._newest.wall_ms - self._newest_at

    def stamp(self) -> Hlc:
        """Return the timestamp of the next request."""
        now_ms = 0 if self._server_clock else self._wall_ms()
        if not self._server_clock and self._value.wall_ms - now_ms > MAX_DRIFT_MS:
            # The machine's clock was set back: timestamps after the old time would be rejected until it is reached
            # again. Starting at the new time is safe, because the store assigns the versions, in increasing order.
            self._value = Hlc(0, 0, self._value.node)
        self._value = self._value.ticked(now_ms)
        return self._value

    def receive(self, text: str | None) -> Hlc | None:
        """Parse a received version and advance the clock to it, unless it is more than a minute ahead."""
        version = parse(text) if text is not None else None
        if version is None:
            return None
        now_ms = self._wall_ms()
        if self._newest is None or version > self._newest:
            self._newest, self._newest_at = version, now_ms
        if self._server_clock:
            if version > self._value:
                self._value = Hlc(version.wall_ms, version.counter, self._value.node)
            return version
        try:
            self._value = self._value.merged(version, now_ms)
        except RemoteProtocolError as error:
            # The response is valid nevertheless.
            if self._warned_at is None or now_ms - self._warned_at > _WARN_AGAIN_MS:
                self._warned_at = now_ms
                _log.warning("%s", error)
        return version

    def skew(self) -> tuple[int | None, str]:
        """Return how many ms this clock is ahead of the store's (None: not known), and an explanation."""
        if self._newest is None:
            return None, (
                f"this machine's clock is more than {MAX_DRIFT_MS // 1000} s ahead of the store's,"
                " or the store's is behind"
            )
        ahead_ms = self._wall_ms() - self._newest.wall_ms
        return ahead_ms, (
            f"this machine's clock is {ahead_ms / 1000:.0f} s ahead of the newest version received from the store"
            f" ({self._newest}); at most {MAX_DRIFT_MS // 1000} s are allowed"
        )


class RequestSender:
    """Sends the requests of one client and receives their responses. ``extra``: user properties of each request."""

    def __init__(self, mqtt: MqttClient, clock: RequestClock, timeout_s: float, extra: Mapping[str, str]) -> None:
        self.timeout_s = checked_timeout(timeout_s)
        self.clock = clock
        self._mqtt = mqtt
        self._extra = extra
        self._prefix = os.urandom(8)
        self._requests = 0
        # Errors are results: asyncio would log an exception that no task retrieves because the caller was cancelled.
        self._futures: dict[bytes, asyncio.Future[Publish | UnavailableError]] = {}
        self.lost_sessions = 0
        """Reconnects for which the broker had no session, and so no responses."""
        self._answered = False
        """Whether there was a response: then a broker without a subscriber has lost its state store for now."""

    async def call(
        self,
        args: list[bytes],
        fencing_token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: Mapping[str, str] | None = None,
        named: tuple[str, bytes] | None = None,
        extension: str | None = None,
        resend: bool = False,
    ) -> tuple[bytes, Hlc | None]:
        """Send a request and wait for its response; return the payload and its version.

        Errors contain the command and key in ``named`` (default: the first two of ``args``), and the ``extension`` of
        the store that the request needs (default: that of the command). ``resend``: also send a write again if the
        broker has lost the session; a second execution must be harmless.

        Raises:
            LocalProtocolError: ``fencing_token`` is no version, or ``timeout_s`` no time.
            StateStoreError: the store rejected the request.
            UnavailableError: no response in time, or the connection was lost during a write, and with it the session
                in which the broker would recognize the repeated request (``applied`` None).
            NoStateStoreError: no response in time to this or an earlier request, and the broker has no subscriber.
        """
        token: object = fencing_token
        if token is not None and not isinstance(token, Hlc):
            raise LocalProtocolError(
                f"state store: fencing_token is {token!r:.60}, expected a version",
                hint="pass lease.token, or parse a text: penstock.statestore.hlc.parse(text)",
            )
        named = named or (args[0].decode(), args[1])
        timeout_s = self.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        self._requests += 1
        correlation = self._prefix + self._requests.to_bytes(8, "big")
        publish = request(
            args,
            self._mqtt.client_id,
            correlation,
            self.clock.stamp(),
            fencing_token=fencing_token,
            expiry_s=max(1, math.ceil(timeout_s)),
            extra={**self._extra, **extra} if extra else self._extra,
        )
        code: int | None = None
        lost_sessions = self.lost_sessions
        future = self._futures[correlation] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # Not queued without a connection: a write must not be executed long after its timeout.
                await self._mqtt.wait_connected()
                code = await self._mqtt.publish(
                    publish.topic,
                    publish.payload,
                    qos=1,
                    properties=publish.properties,
                    # A second execution could give a wrong answer, or overwrite a later value of another client.
                    resend=resend or args[0] in _READS,
                )
                message = await future
        except TimeoutError:
            raise self._no_answer(named, timeout_s, code, lost=self.lost_sessions > lost_sessions) from None
        except UnavailableError as error:
            if error.applied is not None or self.lost_sessions == lost_sessions:
                raise
            raise UnavailableError(
                f"state store: whether {named[0]} {as_text(named[1])} was executed is unknown",
                applied=None,
                why=_LOST_SESSION,
                hint=_READ_FIRST,
            ) from error
        except LocalProtocolError as error:
            raise _not_sent(named, error) from None
        finally:
            del self._futures[correlation]
        if isinstance(message, UnavailableError):
            raise message
        return self._answer(named, fencing_token, message, extension)

    def _no_answer(
        self, named: tuple[str, bytes], timeout_s: float, code: int | None, *, lost: bool
    ) -> UnavailableError:
        kind = UnavailableError
        if not self._mqtt.connected:
            why, hint = "not connected to the broker", "repeat the request when the broker is reachable"
        elif code == ReasonCode.NO_MATCHING_SUBSCRIBERS:
            why = "the broker has no subscriber for state store requests"
            hint = (
                "use a broker with a state store (penstock up), or attach one: penstock statestore attach --broker URL"
            )
            # Not at once: a state store inside the broker need not be a subscriber.
            kind = UnavailableError if self._answered else NoStateStoreError
        elif lost:
            why, hint = _LOST_SESSION, _READ_FIRST
        else:
            why = "no state store at this broker, or it is overloaded, or its disk is full or slow: see its /readyz"
            hint = _READ_FIRST
        return kind(
            f"state store: no answer to {named[0]} {as_text(named[1])} within {timeout_s:.3g} s",
            applied=None,
            why=why,
            hint=hint,
        )

    def _answer(
        self, named: tuple[str, bytes], token: Hlc | None, message: Publish, extension: str | None
    ) -> tuple[bytes, Hlc | None]:
        properties = message.properties
        command, key = named
        status = properties.user_property("__stat")
        if status == _TIMED_OUT:
            raise UnavailableError(
                f"state store: no answer to {command} {as_text(key)} in time",
                applied=None,
                why=properties.user_property("__stMsg"),
                hint=_READ_FIRST,
            )
        if status != "200":
            text, field = properties.user_property("__stMsg"), properties.user_property("__propName")
            raise status_refusal(command, key, status, text, field)
        payload = message.payload
        if not payload.startswith(b"-"):
            return payload, self.clock.receive(properties.user_property("__ts"))
        text = decode_reply(payload).text
        why, skew_ms = None, None
        if text == StoreError.TIMESTAMP_TOO_FAR_AHEAD:
            skew_ms, why = self.clock.skew()
        self.clock.receive(properties.user_property("__ts"))
        if extension is None and command in COMMANDS:
            from penstock.statestore.options import EXTENSIONS

            wanted = COMMANDS[Verb(command)].extension
            extension = next((name for name, each in EXTENSIONS.items() if each == wanted), None)
        raise refusal(command, key, text, token=token, why=why, skew_ms=skew_ms, extension=extension)

    def receive_response(self, message: Publish) -> None:
        """Complete the request that ``message`` answers; drop a response that arrived after the timeout."""
        self._answered = True
        correlation = message.properties.correlation_data
        future = self._futures.get(correlation) if correlation is not None else None
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self, error: PenstockError | None) -> None:
        """Fail all requests: the client was closed (None), or will not connect again."""
        for future in self._futures.values():
            if not future.done():
                why = error.what if error is not None else "the client was closed"
                future.set_result(UnavailableError("state store: the request was not answered", applied=None, why=why))


def _not_sent(named: tuple[str, bytes], error: LocalProtocolError) -> LocalProtocolError:
    """Return the error for a request that exceeds the server's Maximum Packet Size; return other errors unchanged."""
    if error.why is None or "Maximum Packet Size" not in error.why:
        return error
    command, key = named
    large = f"the value of key {as_text(key)}" if command in _WITH_VALUE else f"the request {command} {as_text(key)}"
    return LocalProtocolError(
        f"state store: {large} is too large",
        why=error.why.replace("it has", "the message has", 1),
        hint="split it, or raise mqtt.limits.max_packet_size of the broker",
    )

"""When a connection is read and written: full transports, holds, publish rate, and silence that lasts too long.

Source: MQTT 5.0 sections 3.1.2.10, 4.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.acknowledgements import Acknowledgements
from penstock.mqtt.engine.connections.token_bucket import TokenBucket
from penstock.mqtt.engine.model.access import may_hurry
from penstock.mqtt.engine.model.limits import RateLimitPolicy

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker

__all__ = ["Backpressure"]


class Backpressure(Acknowledgements):
    """The times of a connection, and what holds it back."""

    __slots__ = (
        "_full_since",
        "_resume_at",
        "_was_held",
        "connected_at",
        "keep_alive_ms",
        "last_received",
        "rate",
    )

    def __init__(self, broker: Broker, now: int) -> None:
        super().__init__(broker)
        self._resume_at = 0
        """When a client that publishes too fast may go on."""
        self.last_received = now
        self._full_since: int | None = None
        """When the transport became full; None while it is not."""
        self._was_held = False
        """Whether it was held since the last look at its keep alive."""
        self.connected_at = now
        self.keep_alive_ms = 0
        self.rate: TokenBucket | None = None

    def disconnect(self, reason_code: int, now: int, reason_string: str = "") -> None:
        """End the connection with DISCONNECT."""
        raise NotImplementedError

    def close(self) -> None:
        """Close after what is queued."""
        raise NotImplementedError

    def pause(self, now: int) -> None:
        """The transport is full."""
        self.writable = False
        self._full_since = now
        self.broker.timers.arm(self, now + self.broker.limits.write_stall_ms)

    def unpause(self, now: int) -> None:
        """The transport takes bytes again."""
        self._full_since = None
        self._go_on(now)

    def end_throttle(self, now: int) -> None:
        """A new turn: there is room for output again."""
        self.throttled = False
        self._go_on(now)

    def _go_on(self, now: int) -> None:
        self.writable = self._full_since is None and not self.throttled
        if self.writable and self.session is not None and not self.closing:
            self.session.send_waiting(now)

    def due(self, now: int) -> None:
        """CONNECT, the next packet or room to write is overdue, or was: then arm for the real deadline."""
        if self.closing:
            return
        limits, grace = self.broker.limits, self.broker.grace_until
        if self.session is None:
            deadline = max(self.connected_at + limits.connect_timeout_ms, grace)
            if now >= deadline:
                self.close()
                return
            self.broker.timers.arm(self, deadline)
            return
        if self._resume_at:
            self._resume_at = self.rate.ready_at(now) if self.rate is not None else now
            if now >= self._resume_at:
                self._resume_at = 0
                self.release()
            else:
                self.broker.timers.arm(self, self._resume_at)
        if self._was_held:  # its silence was ours
            self._was_held = self.holds > 0
            self.last_received = now
        if self.keep_alive_ms:
            deadline = max(self.last_received + self.keep_alive_ms, grace)
            if now >= deadline:  # [MQTT-3.1.2-22]
                self.disconnect(ReasonCode.KEEP_ALIVE_TIMEOUT, now)
                return
            self.broker.timers.arm(self, deadline)
        if self._full_since is not None:
            deadline = max(self._full_since + limits.write_stall_ms, grace)
            if now >= deadline:
                self.stats.write_stalls += 1
                self.disconnect(ReasonCode.QUOTA_EXCEEDED, now, "the client does not read")
                return
            self.broker.timers.arm(self, deadline)

    def hold(self) -> None:
        """Have the shell read nothing more until :meth:`release` was called as often."""
        self.holds += 1
        self._was_held = True

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self.holds -= 1
        if not self.holds:
            self.mark()

    def too_fast(self, publish: Publish, now: int) -> int:
        """The client publishes faster than it may: the reason code for the message, 0 to take it."""
        rate, session = self.rate, self.session
        assert rate is not None
        assert session is not None
        if may_hurry(publish, session.rights):
            rate.give_back()
            return 0
        self.stats.rate_exceeded += 1
        policy = self.broker.limits.rate_limit_action
        if policy is RateLimitPolicy.DISCONNECT:
            self.disconnect(ReasonCode.MESSAGE_RATE_TOO_HIGH, now)
        elif policy is RateLimitPolicy.REFUSE:
            rate.give_back()
            return ReasonCode.QUOTA_EXCEEDED
        elif not self._resume_at:
            self._resume_at = rate.ready_at(now)
            self.hold()
            self.broker.timers.arm(self, self._resume_at)
        return 0

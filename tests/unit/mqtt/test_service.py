"""Inbound is settled once."""

from __future__ import annotations

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.service import Inbound


def test_only_the_first_settle_counts() -> None:
    calls: list[tuple[int, str]] = []
    message = Inbound(Publish("a"), "c", 1, settle=lambda code, text: calls.append((code, text)))
    message.settle(0x87, "no")
    message.settle()
    assert calls == [(0x87, "no")]


def test_qos_0_has_nothing_to_settle() -> None:
    Inbound(Publish("a"), "c", 1).settle()


def test_whether_the_end_of_the_connection_can_still_tell_the_client() -> None:
    class Connection:
        closing = False
        resumed = False

        def disconnect_client(self, reason_code: int, reason_string: str) -> None:
            ended.append((reason_code, reason_string))

        def hold(self) -> None: ...

        def release(self) -> None: ...

    ended: list[tuple[int, str]] = []
    connection = Connection()
    message = Inbound(Publish("a", b"", 1), "c", 0, connection=connection)
    before = message.connected
    connection.closing = True
    assert (before, message.connected) == (True, False)
    message.disconnect(0x89, "busy")
    assert ended == [(0x89, "busy")], "the connection itself knows whether it has ended"
    will = Inbound(Publish("a", b"", 1), "c", 0)
    will.disconnect(0x89, "busy")
    assert (will.connected, ended) == (False, [(0x89, "busy")])

"""Every failure says what, why and what to do."""

from __future__ import annotations

import socket

import pytest

from penstock.errors import RefusedError
from penstock.mqtt.client import errors
from penstock.mqtt.codec.packets import ConnAck
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.events import Closed
from penstock.mqtt.url import BrokerUrl, parse_broker_url

PLAIN = parse_broker_url("mqtt://plant:1883")
SECURE = parse_broker_url("mqtts://plant")


@pytest.mark.parametrize(
    ("error", "why", "hint"),
    [
        (ConnectionRefusedError(111, "refused"), "nothing listens there", "penstock up"),
        (socket.gaierror(-2, "Name or service not known"), "'plant' is not known", "correct the address"),
    ],
)
def test_no_connection(error: OSError, why: str, hint: str) -> None:
    failure = errors.not_connected(SECURE, error)
    assert failure.applied is False
    assert failure.what == "mqtt: no connection to mqtts://plant:8883"
    assert why in (failure.why or "")
    assert hint in (failure.hint or "")


def test_a_port_with_tls_is_recognised_by_its_alert() -> None:
    error = errors.tls_server(PLAIN)
    assert str(error).splitlines()[1:] == [
        "  why: it answered CONNECT with a TLS alert",
        "  hint: connect to mqtts://plant:1883",
    ]


def test_connections_that_say_nothing() -> None:
    assert "connect to mqtts://plant:1883" in str(errors.no_answer(PLAIN, 3))
    assert "connect to mqtts://plant:1883" in str(errors.lost(PLAIN, accepted=False))
    assert errors.lost(SECURE, accepted=True).applied is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (PLAIN, "it stops or restarts, uses TLS, or does not speak MQTT"),
        (SECURE, "it stops or restarts, requires a client certificate, or does not speak MQTT"),
    ],
)
def test_a_connection_that_ends_before_the_answer_has_several_possible_reasons(url: BrokerUrl, why: str) -> None:
    error = errors.lost(url, accepted=False)
    assert (error.applied, error.why) == (False, why)
    assert (error.hint or "").startswith("try again; if it repeats, check that this port speaks MQTT 5")


@pytest.mark.parametrize(
    ("code", "retriable"), [(0x86, False), (0x87, False), *((code, True) for code in (0x89, 0x97, 0x9C))]
)
def test_refused_connects(code: int, retriable: bool) -> None:
    error = errors.connect_refused(PLAIN, ConnAck(reason_code=code, properties=Properties(reason_string="so")))
    assert (error.code, error.text, error.why, error.retriable) == (code, "so", "so", retriable)
    moved = errors.connect_refused(PLAIN, ConnAck(reason_code=0x9D, properties=Properties(server_reference="other:1")))
    assert "other:1" in (moved.hint or "")


def test_ended_connections() -> None:
    taken = errors.closed(PLAIN, Closed(0x8E, "", by_server=True), "me")
    assert isinstance(taken, RefusedError)
    assert "'me'" in str(taken)
    moved = errors.closed(PLAIN, Closed(0x9C, "", by_server=True, server_reference="b:2"), "me")
    assert "b:2" in str(moved)
    assert moved.retriable
    assert errors.abandoned(taken, sent=False).applied is False

"""What may go the quick way is decided once, from one request; the ways are compared in ``tests/engine/statestore``."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import LikeProperties, Properties
from penstock.mqtt.codec.shapes import LikePublish
from penstock.mqtt.service import Inbound
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.resp3 import encode_array
from tests.engine.statestore import FakeConnection, FakeOutlet, ManualClock, open_service

_CLOCK = ManualClock()
_PLAIN = (("__ts", f"{_CLOCK.now_ms:015}:%05d:c"), ("__protVer", "1.0"))


def _request(number: int, user: tuple[tuple[str, str], ...], **given: object) -> bytes:
    properties = Properties(
        response_topic="answers/here",
        correlation_data=number.to_bytes(4, "big"),
        user_properties=[(name, text % number if "%" in text else text) for name, text in user],
    )
    for name, value in given.items():
        setattr(properties, name, value)
    get = encode_array((b"GET", b"k"))
    return encode(Publish(INVOKE, get, 1, packet_id=number, properties=properties))


@pytest.mark.parametrize(
    ("user", "given", "prepared"),
    [
        (_PLAIN, {}, True),
        (_PLAIN, {"message_expiry_interval": 10}, True),
        (_PLAIN, {"payload_format_indicator": 1}, False),
        (_PLAIN, {"response_topic": "answers/\N{SNOWMAN}"}, True),
        ((*_PLAIN, ("changes", "%03d")), {}, False),
        ((*_PLAIN, ("__ft", "1:1:c")), {}, False),
        ((*_PLAIN, ("__fencePrefix", "p")), {}, False),
        ((*_PLAIN, ("__ts", "1:1:c")), {}, False),
        ((("__ts", "no:%05d:c"), ("__protVer", "1.0")), {}, False),
        ((("__protVer", "1.0"),), {}, False),
    ],
)
async def test_requests_that_may_go_the_quick_way(
    tmp_path: Path, user: tuple[tuple[str, str], ...], given: dict[str, object], *, prepared: bool
) -> None:
    outlet = FakeOutlet()
    service = await open_service(tmp_path, outlet, _CLOCK)
    decoder = Decoder(role=Role.SERVER)
    for number in range(1, 5):
        (packet,) = decoder.feed(_request(number, user, **given))
        assert isinstance(packet, Publish)
        if isinstance(packet, LikePublish):
            break
        connection = FakeConnection(outlet)
        service.receive(Inbound(packet, "c", _CLOCK.now_ms, connection=connection))
    assert isinstance(packet, LikePublish) is prepared
    if isinstance(packet, LikePublish):
        packet.complete()
        assert isinstance(packet.optional_properties, LikeProperties)
        again = Decoder(role=Role.SERVER).feed(_request(number, user, **given))[0]
        assert isinstance(again, Publish)
        assert (packet, packet.properties_wire, packet.topic_wire) == (again, again.properties_wire, again.topic_wire)
    await service.close()

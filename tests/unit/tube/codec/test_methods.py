"""The method table against the recording and against itself."""

from __future__ import annotations

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import METHODS, RESERVED, MethodId, PeerRole, ServiceType
from tests.unit.tube.vectors import frames


def test_names_and_types_are_the_recorded_ones() -> None:
    seen = set()
    for frame in frames():
        row = METHODS.get(frame.row.get("method", 0))
        if row is not None and frame.row["type"] != "RspExceptionBody":
            kind = row.request if frame.direction == "request" else row.response
            assert kind.DESCRIPTOR.name == frame.row["type"]
            assert row.name == frame.row["methodName"]
            assert frame.row["to"] == row.answers.name.lower()
            seen.add(row.id)
    assert seen == set(METHODS)


def test_table_is_consistent() -> None:
    assert set(METHODS) == set(MethodId)
    assert not RESERVED & set(METHODS)
    assert all((row.answers is PeerRole.MASTER) == (row.services == (ServiceType.MASTER,)) for row in METHODS.values())
    assert METHODS[13].services == (ServiceType.BROKER_WRITE, ServiceType.BROKER_READ)
    assert ErrCode(200) is ErrCode.SUCCESS

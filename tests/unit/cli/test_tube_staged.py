"""`penstock tube staged list`: what is staged, shown and let go, with brokers that are away."""

from __future__ import annotations

from tests.unit.cli.conftest import BROKER, Command, Web

AWAY = {**BROKER, "brokerId": 2, "brokerPort": 8125, "runStatus": "notRegister", "brokerWebAddress": "127.0.0.1:9"}
ROW = {"queryName": "q", "run": "r", "batchId": 7, "taskId": 0, "attempt": "a", "rows": 3, "bytes": 90,
       "state": "prepared", "ageMs": 61_000}  # fmt: skip


def test_an_unavailable_broker_does_not_stop_the_others(penstock: Command, web: Web) -> None:
    """It may be gone for good, and what waits for it is to be let go."""
    web.answers = {
        "admin_query_broker_run_status": [{**BROKER, "brokerWebAddress": "127.0.0.1:7"}, AWAY],
        "admin_query_staged_rows": [ROW],
        "admin_rmv_staged_rows": [{"queryName": "q", "attempts": 1}],
    }
    shown = penstock("tube", "staged", "list")
    assert "prepared" in shown.out
    assert "broker 2 at 127.0.0.1:8125 is unavailable" in shown.err
    done = penstock("tube", "staged", "delete", "q", "--force")
    assert (done.status, "1 attempts of query q were deleted" in done.err) == (0, True)
    asked = [(address, method) for address, method, _ in web.calls if "staged" in method]
    assert asked == [("127.0.0.1:7", "admin_query_staged_rows"), ("127.0.0.1:7", "admin_rmv_staged_rows")]


def test_misuse(penstock: Command) -> None:
    for wrong in (["list", "--force"], ["delete"], ["delete", "--force"], ["resolve"], ["resolve", "q", "--force"]):
        assert penstock("tube", "staged", *wrong).status == 2

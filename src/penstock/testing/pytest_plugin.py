"""Plugin for pytest: a real broker with a state store for every test that uses its fixtures.

    def test_the_controller_writes_its_setpoint(penstock_statestore):
        controller.run_once(broker=penstock_statestore.url)
        assert penstock_statestore.get("setpoint").value == b"21.5"

Each test has a separate node, on a free port, with its own data. It runs in a thread, so tests may be plain
functions or coroutines. ``@pytest.mark.penstock(...)`` passes arguments to :class:`penstock.testing.LocalNode`, as in
``@pytest.mark.penstock(faults=True, max_keys=10)``.

Only the fixtures import penstock, so that a test run without them is not slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.statestore.blocking import Client
    from penstock.testing.local_node import LocalNode

__all__ = ["penstock_broker", "penstock_statestore", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "penstock(**options): options of penstock.testing.LocalNode for penstock_broker, penstock_statestore"
    )


@pytest.fixture
def penstock_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalNode]:
    """An MQTT broker with a state store, stopped after the test: ``url``, ``host``, ``port``, ``restart()``."""
    from penstock.testing.local_node import LocalNode

    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("penstock"))):
        if marker.args:
            pytest.fail(f"@pytest.mark.penstock accepts keyword arguments only, got {marker.args!r}", pytrace=False)
        options |= marker.kwargs
    try:
        node = LocalNode(tmp_path / "penstock", **options)
    except (TypeError, ValueError) as error:
        pytest.fail(f"@pytest.mark.penstock: {error}", pytrace=False)
    with node:
        yield node


@pytest.fixture
def penstock_statestore(penstock_broker: LocalNode) -> Client:
    """A connected client of the state store of ``penstock_broker``, to prepare keys and to check results.

    It is a :class:`penstock.statestore.blocking.Client`; ``url`` is the address for the application under test.
    """
    return penstock_broker.client()

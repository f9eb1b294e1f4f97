"""Record what MQTT clients of real processes send and receive, and check it by the rules of ``MqttHistory``.

The simulation checks by the same rules. The format is in README.md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.simulation.history import Violation
from tests.simulation.mqtt_history import Message, MqttHistory, Wanted, Window

__all__ = ["MqttRecorder", "check"]


class MqttRecorder:
    """Writes a line for each event of the clients of one test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, event: str, client: str, **fields: object) -> None:
        """Add an event, which happens now."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "client": client, "at": time.monotonic_ns(), **fields}) + "\n")


def check(path: Path) -> str:
    """Check a history at whose end everything should have arrived; one line about it.

    Raises:
        Violation: a rule was broken.
    """
    history, numbers, identifiers = MqttHistory(ample_ms=0), dict[str, int](), dict[str, int]()
    now = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        kind, client, now = event["event"], event["client"], event["at"]
        name = event.get("message", "")
        if kind == "publish":
            number = numbers[name] = len(numbers) + 1
            history.publish(Message(number, client, event["topic"], event["qos"]), now)
        elif kind == "acknowledge":
            history.acknowledge(history.messages[numbers[name]], now)
        elif kind == "subscribe":
            identifier = identifiers[client] = len(identifiers) + 1
            wanted = Wanted(identifier, client, event["filter"], event["qos"], now, windows=[Window(0)])
            history.subscribe(wanted)
        elif kind == "confirm":
            history.subscriptions[identifiers[client]].confirmed_ms = now
        elif kind == "receive":
            found, topic = numbers.get(name, -1), event["topic"]
            history.receive(client, found, [identifiers[client]], event["qos"], now, retained=False, topic=topic)
        else:
            raise Violation(f"{path}: event {kind!r} is not known")
    history.check_delivered(now)
    return f"ok messages={len(numbers)} acknowledged={history.acknowledged} delivered={history.delivered}"

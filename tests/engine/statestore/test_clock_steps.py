"""A system clock that jumps: versions, time stamps and expiry of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.io.clock import SteppedClock
from penstock.runtime.io.files import Durability
from penstock.statestore.hlc import MAX_DRIFT_MS
from penstock.statestore.service import service as services
from penstock.statestore.service.service import StateStoreService
from tests.engine.statestore import FakeOutlet, ManualClock, ManualQueue, Peer

NOW_S = 1_790_000_000
TEN_YEARS_S = 10 * 365 * 86_400


class Machine:
    """A machine with a system clock that can be wrong; ``client`` has a right one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error_s: int = 0) -> None:
        self.error_s = error_s
        self.client = ManualClock(NOW_S * 1000)
        self.booted_s = 100
        self.boot = "first"
        monkeypatch.setattr(services, "boot_id", lambda: self.boot)
        monkeypatch.setattr(services, "boot_ms", lambda: self.booted_s * 1000)
        self.clock = self.new_clock()
        self.outlet = FakeOutlet()

    def new_clock(self) -> SteppedClock:
        return SteppedClock(
            hold_s=300,
            wall=lambda: (self.client.now_ms + self.error_s * 1000) * 1_000_000,
            elapsed=lambda: self.booted_s * 1_000_000_000,
        )

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.client.now_ms += 1000
            self.booted_s += 1
            self.clock.check()

    def reboot(self, seconds: int) -> None:
        """It is down for so long."""
        self.boot += "+"
        self.booted_s = 10
        self.client.now_ms += seconds * 1000

    async def store(self, path: Path, durability: Durability = Durability.MEMORY) -> tuple[StateStoreService, Peer]:
        self.clock = self.new_clock()
        service = StateStoreService(path, durability, self.clock)
        await service.start(self.outlet)
        return service, Peer(service, self.outlet, self.client)


def ask(peer: Peer, words: str) -> bytes:
    """The answer, which a client with a right clock accepts."""
    answer = peer.ask(words)
    assert answer.version is None or answer.version.wall_ms - peer.clock.now_ms <= MAX_DRIFT_MS
    return answer.payload


async def test_a_clock_that_is_wrong_for_a_moment_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    service, peer = await machine.store(tmp_path)
    for error_s in (TEN_YEARS_S, 0, -TEN_YEARS_S // 20, 0):
        machine.error_s = error_s
        for _ in range(3):
            assert ask(peer, "SET k v") == b"+OK\r\n"
            assert ask(peer, "SET lock me NEX PX 10000") == b"+OK\r\n"
            assert ask(peer, "GET k") == b"$1\r\nv\r\n"
            assert peer.ask("SET k v", ts=f"{machine.client.now_ms + MAX_DRIFT_MS + 5000}:0:fast").payload.startswith(
                b"-ERR"
            ), "the rule for clients is as it was"
            machine.passes(20)
    assert service.clock_problem() is None
    await service.close()


async def test_a_clock_that_is_set_for_good_is_followed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was an hour behind until its time server was reached."""
    machine = Machine(monkeypatch, error_s=-3600)
    service, peer = await machine.store(tmp_path)
    assert ask(peer, "SET k v").startswith(b"-ERR"), "the client's time stamp is too far ahead"
    machine.error_s = 0
    machine.passes(302)
    assert ask(peer, "SET k v") == b"+OK\r\n"
    await service.close()


@pytest.mark.parametrize("error_s", [25, -25])
async def test_a_step_does_not_expire_responses_that_wait_for_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_s: int
) -> None:
    """It is followed at once; requests expire on the clock that never steps."""
    machine = Machine(monkeypatch)
    service, peer = await machine.store(tmp_path, Durability.DURABLE)
    queue = ManualQueue()
    queue.attach(service)
    peer.send("SET k v", expiry=10)
    machine.error_s = error_s
    machine.passes(1)
    assert machine.clock.offset_ms == 0, "the step was followed"
    assert machine.outlet.taken() == []
    queue.finish()
    (answer,) = machine.outlet.taken()
    assert answer.payload == b"+OK\r\n"
    assert answer.publish.properties.message_expiry_interval == 9
    peer.clock.now_ms += error_s * 1000  # when the client's clock is the same
    peer.send("SET k w", expiry=10)
    peer.clock.now_ms -= error_s * 1000
    machine.passes(10)
    queue.finish()
    assert machine.outlet.taken() == [], "it has expired"
    await service.close()


async def test_versions_rise_while_a_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, error_s=1800)
    service, peer = await machine.store(tmp_path)
    last = peer.ask("SET k v").version
    assert last is not None
    machine.error_s = 0
    for _ in range(8):
        machine.passes(60)
        version = peer.ask("SET k v").version
        assert version is not None
        assert version > last
        last = version
    problem = str(service.clock_problem())
    assert "ahead of the clock" in problem
    assert "penstock statestore repair" in problem
    assert 0 < service.version_lead_ms <= 1_800_000
    machine.passes(1800)
    assert ask(peer, "SET k v") == b"+OK\r\n", "time has caught up"
    assert service.clock_problem() is None
    await service.close()


@pytest.mark.parametrize("wrong_s", [-NOW_S + 50, TEN_YEARS_S])
async def test_keys_live_as_long_as_they_were_set_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_s: int
) -> None:
    """A machine without a battery clock starts in 1970, another one ten years ahead; then the clock is set."""
    machine = Machine(monkeypatch, error_s=wrong_s)
    service, peer = await machine.store(tmp_path)
    stamp = f"{machine.clock()}:0:c"
    for words in ("SET short v PX 60000", "SET long v PX 7200000"):
        assert peer.ask(words, ts=stamp).payload == b"+OK\r\n"
    machine.error_s = 0
    machine.passes(302)
    service.wake()
    assert service.keys == 1, "only the short one is over"
    await service.close()
    machine.reboot(600)
    service, peer = await machine.store(tmp_path)
    assert service.keys == 1
    machine.passes(7200)
    service.wake()
    assert service.keys == 0
    await service.close()


@pytest.mark.parametrize("step_s", [20, -20, 1])
async def test_a_small_step_neither_ends_nor_extends_a_key_over_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """A time server corrects the clock after the start; it is followed at once, and the clock of expiry is not."""
    machine = Machine(monkeypatch, error_s=-step_s)
    service, peer = await machine.store(tmp_path)
    machine.error_s = 0
    machine.passes(1)
    assert ask(peer, "SET k v PX 600000") == b"+OK\r\n"
    await service.close()
    machine.reboot(590)
    service, peer = await machine.store(tmp_path)
    machine.passes(9)
    assert ask(peer, "GET k") == b"$1\r\nv\r\n"
    machine.passes(2)
    assert ask(peer, "GET k") == b"$-1\r\n"
    await service.close()


async def test_a_store_that_is_closed_does_not_write_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, error_s=-NOW_S + 50)
    service, _ = await machine.store(tmp_path)
    assert len(machine.clock.on_followed) == 1
    await service.close()
    await service.close()
    machine.error_s = 0
    machine.passes(1)
    assert machine.clock.on_followed == []

"""Password checks off the loop: fair between addresses, bounded, remembered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.mqtt import password_checks
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.password_checks import PasswordChecks, check_workers
from penstock.security.passwords import Credential, make_credential

ANN = make_credential("ann", b"right")
DEADLINE_S = 60


class Hashing:
    """Stands in for the slow hash: each check waits until it may end."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.may_end = threading.Semaphore(0)

    def __call__(self, credential: Credential | None, password: bytes) -> bool:
        self.order.append(password)
        assert self.may_end.acquire(timeout=DEADLINE_S)
        return credential is not None and password == b"right"


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    made = Hashing()
    monkeypatch.setattr(password_checks, "verify_password", made)
    yield made
    made.may_end.release(1000)


async def answer(checks: PasswordChecks, password: bytes, *, address: str = "a", user: Credential | None = ANN) -> bool:
    future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
    checks.check(address, "ann", user, password, future.set_result)
    async with asyncio.timeout(DEADLINE_S):
        found = await future
    assert found is not None
    return found


async def test_a_check_that_fails_is_answered_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hash_or_fail(credential: Credential | None, password: bytes) -> bool:
        if password == b"fails":
            raise MemoryError("19 MiB")
        return credential is not None

    monkeypatch.setattr(password_checks, "verify_password", hash_or_fail)
    checks = PasswordChecks(workers=1)
    failed: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
    checks.check("a", "ann", ANN, b"fails", failed.set_result)
    assert await answer(checks, b"right")
    assert await failed is None
    assert "MemoryError" in caplog.text
    checks.close()


async def test_right_and_wrong() -> None:
    checks = PasswordChecks()
    assert await answer(checks, b"right")
    assert not await answer(checks, b"wrong")
    assert not await answer(checks, b"right", user=None)
    assert (checks.hashed, checks.remembered) == (3, 0)
    assert await answer(checks, b"right")
    assert (checks.hashed, checks.remembered) == (3, 1), "what was right is remembered"
    assert await answer(checks, b"right", user=make_credential("ann", b"right"))
    assert checks.hashed == 4, "but not for a user that was changed"
    assert not await answer(checks, b"wrong")
    assert checks.hashed == 5, "nor what was wrong"
    checks.close()


async def test_a_flood_waits_for_itself(hashing: Hashing) -> None:
    checks = PasswordChecks(workers=1)
    done: list[tuple[str, bool | None]] = []
    for n in range(BrokerLimits().max_pending_passwords_per_address + 10):
        checks.check("flood", "ann", ANN, b"%d" % n, lambda right: done.append(("flood", right)))
    checks.check("quiet", "ann", ANN, b"right", lambda right: done.append(("quiet", right)))
    assert done.count(("flood", None)) == checks.refused == 9, "one runs, 64 wait, the rest is told at once"
    done.clear()
    hashing.may_end.release(3)
    async with asyncio.timeout(DEADLINE_S):
        while len(done) < 3:
            await asyncio.sleep(0.005)
    assert done == [("flood", False), ("flood", False), ("quiet", True)], "it waits for one check of the flood, not 64"
    checks.close()
    assert checks.waiting == 0


async def test_the_event_loop_continues_during_a_check(hashing: Hashing) -> None:
    checks = PasswordChecks(workers=2)
    done: list[bool | None] = []
    for n in range(4):
        checks.check(str(n), "ann", ANN, b"right", done.append)
    async with asyncio.timeout(DEADLINE_S):
        while len(hashing.order) < 2:
            await asyncio.sleep(0.005)
    assert (len(hashing.order), checks.waiting, done) == (2, 2, []), "no more than two at a time"
    hashing.may_end.release(4)
    async with asyncio.timeout(DEADLINE_S):
        while len(done) < 4:
            await asyncio.sleep(0.005)
    checks.close()


async def test_the_cache_of_verified_passwords_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(password_checks, "REMEMBERED", 3)
    monkeypatch.setattr(password_checks, "verify_password", lambda *_: True)
    checks = PasswordChecks()
    for n in range(10):
        assert await answer(checks, b"%d" % n)
    assert len(checks._verified) == 3
    checks.close()


def test_a_core_is_left_to_the_loop() -> None:
    assert [check_workers(cores) for cores in (1, 2, 3, 4, 64)] == [1, 1, 2, 2, 2]
    assert PasswordChecks().workers >= 1


async def test_all_addresses_together_are_bounded_and_a_reload_changes_the_bound(hashing: Hashing) -> None:
    limits = BrokerLimits(max_pending_passwords=3, max_pending_passwords_per_address=2)
    checks = PasswordChecks(limits, workers=1)
    done: list[tuple[str, bool | None]] = []

    def ask(address: str) -> None:
        checks.check(address, "ann", ANN, b"wrong", lambda right: done.append((address, right)))

    for address in ("a", "a", "a", "a", "b", "c"):
        ask(address)
    assert done == [("a", None), ("c", None)], "one runs; two of an address wait, three of all"
    limits.max_pending_passwords = 4
    ask("c")
    assert (checks.waiting, checks.refused, len(done)) == (4, 2, 2)
    checks.close()


async def test_an_ipv6_site_has_one_queue(hashing: Hashing) -> None:
    checks = PasswordChecks(BrokerLimits(max_pending_passwords_per_address=2), workers=1)
    done: list[bool | None] = []
    for n in range(4):
        checks.check(f"2001:db8::{n:x}", "ann", ANN, b"wrong", done.append)
    assert done == [None], "one runs, two wait"
    checks.check("2001:db8:0:1::1", "ann", ANN, b"wrong", done.append)
    assert (done, checks.waiting) == ([None], 3)
    checks.close()


async def test_a_check_without_a_waiter_is_not_computed(hashing: Hashing) -> None:
    checks = PasswordChecks(BrokerLimits(max_pending_passwords_per_address=2), workers=1)
    done: list[bytes] = []

    def ask(password: bytes) -> Callable[[], None]:
        withdraw = checks.check("a", "ann", ANN, password, lambda _: done.append(password))
        assert withdraw is not None
        return withdraw

    running, gone, stays = ask(b"right"), ask(b"gone"), ask(b"stays")
    gone()
    gone()
    assert (checks.waiting, checks.withdrawn) == (1, 1)
    ask(b"takes its place")
    running()
    assert (checks.waiting, checks.withdrawn) == (2, 1), "what runs cannot be stopped"
    hashing.may_end.release(3)
    async with asyncio.timeout(DEADLINE_S):
        while len(done) < 2:
            await asyncio.sleep(0.005)
    assert (done, hashing.order) == ([b"stays", b"takes its place"], [b"right", b"stays", b"takes its place"])
    stays()
    assert await answer(checks, b"right"), "what ran all the same is remembered"
    assert (checks.remembered, checks.waiting) == (1, 0)
    checks.close()


async def test_an_impossible_password_is_refused_without_queueing(hashing: Hashing) -> None:
    checks = PasswordChecks(workers=1)
    for user in (ANN, None):
        assert not await answer(checks, b"x" * 1025, user=user)
    assert (hashing.order, checks.hashed, checks.refused) == ([], 0, 0)
    checks.close()


async def test_closing_answers_pending_and_later_checks(hashing: Hashing) -> None:
    checks = PasswordChecks(workers=1)
    done: list[tuple[str, bool | None]] = []

    def ask(name: str) -> None:
        checks.check(name, "ann", ANN, b"right", lambda right: done.append((name, right)))

    for name in ("runs", "waits"):
        ask(name)
    async with asyncio.timeout(DEADLINE_S):
        while not hashing.order:
            await asyncio.sleep(0.005)
    checks.close()
    ask("late")
    assert done == [("waits", None), ("late", None)]
    hashing.may_end.release()
    async with asyncio.timeout(DEADLINE_S):
        while len(done) < 3:
            await asyncio.sleep(0.005)
    assert (done[2], len(hashing.order)) == (("runs", True), 1)

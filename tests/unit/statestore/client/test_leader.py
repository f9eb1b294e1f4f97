"""Leader election: one leads, the others learn of it, and a deposed leader's work ends."""

from __future__ import annotations

import asyncio

import pytest

import penstock.statestore.client.locks
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.locks import LeaderElection
from penstock.statestore.errors import FencingError, LockHeldError
from penstock.statestore.hlc import Hlc


async def test_campaign_and_resign(store: StateStoreClient, other: StateStoreClient) -> None:
    a, b = LeaderElection(store, "leader", candidate="a"), LeaderElection(other, "leader", candidate="b")
    assert await a.leader() is None
    first = await a.campaign()
    assert (a.is_leader, a.token, await b.leader()) == (True, first, b"a")
    with pytest.raises(LockHeldError) as raised:
        await b.campaign(timeout_s=0.05)
    assert raised.value.holder == b"a"
    waiting = asyncio.create_task(b.campaign(timeout_s=60))
    await a.resign()
    assert await waiting > first
    assert (a.is_leader, b.is_leader, await a.leader()) == (False, True, b"b")
    await b.resign()
    assert not b.deposed.is_set()


async def test_observers_learn_the_leader_but_not_its_renewals(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.statestore.client.locks, "_RENEWALS_PER_TTL", 600)
    a, b = LeaderElection(store, "leader", candidate="a", ttl_ms=30_000), LeaderElection(other, "leader", candidate="b")
    async with asyncio.timeout(60), b.observe() as leaders, store.observe("leader") as sets:
        assert (await anext(leaders)).candidate is None
        token = await a.campaign()
        assert await anext(leaders) == (b"a", token)
        assert [(await anext(sets)).operation for _ in range(3)] == ["SET"] * 3  # the campaign's and two renewals
        await a.resign()
        assert (await anext(leaders)).candidate is None
        await b.campaign()
        assert (await anext(leaders)).candidate == b"b"
        await b.resign()
    async with a.observe() as leaders:
        assert (await anext(leaders)).candidate is None


async def test_a_deposed_leader_stops_its_work_and_campaigns_again(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.statestore.client.locks, "_RENEWALS_PER_TTL", 600)
    election = LeaderElection(store, "leader", candidate="a", ttl_ms=30_000)
    tokens: list[Hlc] = []

    async def work(token: Hlc) -> str:
        tokens.append(token)
        await store.set("output", "a", fencing_token=token)
        if len(tokens) == 1:
            # Another takes over behind our back, writes with a newer token, and goes when we have noticed it.
            usurped = await other.set("leader", "usurper")
            await other.set("output", "usurper", fencing_token=usurped.version)
            try:
                await asyncio.Event().wait()
            finally:
                assert await other.vdelete("leader", "usurper") == 1
        return "done"

    async with asyncio.timeout(60):
        assert await election.run(work) == "done"
    assert len(tokens) == 2
    assert tokens[1] > tokens[0]
    with pytest.raises(FencingError):
        await store.set("output", "late", fencing_token=tokens[0])
    assert await election.leader() is None

"""What the integration tests of the Go and .NET SDKs send and expect, told by clients that speak as those SDKs do.

Each test names the tests of the SDKs that it stands for. The Go and Rust columns can also be run for real where their
tool chains are; .NET could not be run, so here it is by its source alone.
"""

from __future__ import annotations

import asyncio
import uuid

import pytest

from penstock.mqtt.codec.properties import Properties
from penstock.statestore.hlc import Hlc
from tests.conformance.statestore.node import StoreNode
from tests.conformance.statestore.sdk_clients import DOTNET, GO, RUST, Profile, RefusedByStoreError, SdkClient
from tests.vectors.statestore import vectors

ERRORS = vectors()["errors"]["texts_matched_exactly"]
LOWER = ERRORS[3]
LONG_MS = 600_000

every_sdk = pytest.mark.parametrize("sdk", [GO, DOTNET, RUST], ids=lambda profile: str(profile.name))


def name() -> str:
    return str(uuid.uuid4())


@every_sdk
async def test_crud(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreObjectCRUD."""
    async with SdkClient(node.port, sdk) as client:
        key, value = name(), name()
        done, version = await client.set(key, value)
        assert done
        assert await client.get(key) == (value.encode(), version)
        assert await client.delete(key) == 1
        assert await client.get(key) is None


@every_sdk
async def test_expiry_is_notified_and_the_key_is_deleted(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreObjectExpiryTime, TestStateStoreObserveSingleKeyThatExpires."""
    async with SdkClient(node.port, sdk) as client:
        key, value = name(), name()
        await client.observe(key)
        assert (await client.set(key, value, px_ms=1000))[0]
        written = await client.notice()
        assert (written.key, written.operation, written.value) == (key.encode(), "SET", value.encode())
        expired = await client.notice()
        assert (expired.key, expired.operation, expired.value) == (key.encode(), "DELETE", None)
        assert expired.version > written.version
        assert await client.get(key) is None


@every_sdk
async def test_conditional_set(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreConditionalSet."""
    async with SdkClient(node.port, sdk) as client:
        key, value, other = name(), name(), name()
        done, version = await client.set(key, value, "NX")
        assert done
        assert await client.set(key, value, "NX") == (False, version)
        assert await client.set(key, other, "NEX") == (False, version)
        done, newer = await client.set(key, value, "NEX")
        assert done
        assert newer > version
        assert (await client.set(name(), value, "NX"))[0]
        assert (await client.set(name(), value, "NEX"))[0]
        assert await client.delete(key) == 1


@every_sdk
async def test_conditional_delete(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreConditionalDelete."""
    async with SdkClient(node.port, sdk) as client:
        key, value = name(), name()
        await client.set(key, value)
        assert await client.vdelete(key, "this is not the current value") == -1
        assert await client.vdelete(key, value) == 1
        assert await client.vdelete(key, value) == 0


@every_sdk
async def test_observe_and_unobserve(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreObserveSingleKey, TestStateStoreUnobserveSingleKey.

    The callback of .NET may run once a change (it completes a promise), so exactly once is part of it.
    """
    async with SdkClient(node.port, sdk) as client:
        key, value = name(), name()
        await client.set(key, name())
        await client.observe(key)
        await client.set(key, value)
        told = await client.notice()
        assert (told.key, told.operation, told.value) == (key.encode(), "SET", value.encode())
        assert await client.delete(key) == 1
        told = await client.notice()
        assert (told.key, told.operation, told.value) == (key.encode(), "DELETE", None)
        assert await client.unobserve(key)
        await client.set(key, name())
        await client.delete(key)
        await client.settled()
        assert client.notices.empty()


@every_sdk
async def test_odd_keys_and_values(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestStateStoreEmptyValue; .NET UpdateKeyWithEmptyValueShouldNotThrow, CreateStateStoreEntryWith-

    LargeSizeKey and -LargeSizeValue, TestKeyLengthZero, TestWrongNumberOfArguments (which sends nothing wrong).
    """
    async with SdkClient(node.port, sdk) as client:
        key = name()
        _, version = await client.set(key, "")
        # Go tells an empty value from a missing key by the version alone.
        assert await client.get(key) == (b"", version)
        assert await client.delete(key) == 1
        assert (await client.set(bytes(6500), name()))[0]
        assert (await client.set(name(), bytes(65_000)))[0]
        with pytest.raises(RefusedByStoreError, match=r"^the key length is zero$"):
            await client.get("")
        assert (await client.set(name(), "value", "NX", px_ms=1000))[0]
        assert (await client.set(name(), "value", persist=True))[0]


@every_sdk
async def test_fencing(node: StoreNode, sdk: Profile) -> None:
    """Go TestFencing, TestFencingWithSessionID; .NET the same of locks and elections, TestFencingTokenLowerVersion."""
    async with SdkClient(node.port, sdk) as client:
        lock, shared = name(), name()
        holder = f"{client.client_id}:{name()}"
        before = client.stamp()  # Go: of the client's own node, made before the lock was had
        epoch = Hlc(0, 0, name())  # .NET
        assert await client.get(lock) is None
        done, token = await client.set(lock, holder, "NEX", px_ms=LONG_MS)
        assert done
        assert await client.get(lock) == (holder.encode(), token)
        assert (await client.set(shared, name(), ft=token))[0]
        for lower in (before, epoch):
            with pytest.raises(RefusedByStoreError) as refused:
                await client.set(shared, name(), ft=lower)
            assert str(refused.value) == LOWER
            with pytest.raises(RefusedByStoreError) as refused:
                await client.delete(shared, ft=lower)
            assert str(refused.value) == LOWER
        assert await client.delete(shared, ft=token) == 1
        assert await client.vdelete(lock, holder) == 1
        assert await client.get(lock) is None


@every_sdk
async def test_an_edit_under_the_lock(node: StoreNode, sdk: Profile) -> None:
    """Go TestEdit; .NET TestFencingWithAcquireLockAndUpdateValueAsync, -WithCampaignAndUpdateValueAsync."""
    async with SdkClient(node.port, sdk) as client:
        lock, shared = name(), name()
        await client.set(shared, "someInitialValue")
        await client.observe(lock)
        done, token = await client.set(lock, client.client_id, "NEX", px_ms=LONG_MS)
        assert done
        assert await client.unobserve(lock)
        found = await client.get(shared)
        assert found is not None
        assert found[0] == b"someInitialValue"
        assert (await client.set(shared, "someUpdatedValue", ft=token))[0]
        assert await client.vdelete(lock, client.client_id) == 1
        found = await client.get(shared)
        assert found is not None
        assert found[0] == b"someUpdatedValue"


@every_sdk
async def test_acquiring_again_gives_a_later_token(node: StoreNode, sdk: Profile) -> None:
    """Go and .NET TestProactivelyReacquiringALock; .NET TestProactivelyRecampaigning, TestAutomaticRenewal.

    A test of the Rust SDK also compares the counters of two renewals.
    """
    async with SdkClient(node.port, sdk) as client:
        lock, shared = name(), name()
        tokens = [(await client.set(lock, client.client_id, "NEX", px_ms=LONG_MS))[1] for _ in range(5)]
        assert tokens == sorted(set(tokens))
        assert {token.counter for token in tokens} == {1}
        for token in (tokens[0], tokens[-1]):
            assert (await client.set(shared, name(), ft=token))[0]


@every_sdk
async def test_a_lock_is_taken_over_when_its_lease_ends(node: StoreNode, sdk: Profile) -> None:
    """Go TestAcquireLockWhenLockIsUnavailable, TestEditWhenLockIsUnavailable and -DoesNotUpdateValueIfLockNotAcquired.

    .NET: the same three of LeasedLockClient and of LeaderElectionClient.
    """
    async with SdkClient(node.port, sdk) as first, SdkClient(node.port, sdk) as second:
        lock, shared = name(), name()
        done, old = await first.set(lock, first.client_id, "NEX", px_ms=1000)
        assert done
        await second.observe(lock)
        done, new = await second.set(lock, second.client_id, "NEX", px_ms=LONG_MS)
        assert done or new == old  # done on a machine that stood still for the whole lease
        released = await second.notice()
        assert released.operation == "DELETE"
        if not done:
            done, new = await second.set(lock, second.client_id, "NEX", px_ms=LONG_MS)
        assert done
        assert new > released.version > old
        assert await second.unobserve(lock)
        assert await second.get(shared) is None
        assert (await second.set(shared, "someUpdatedValue", ft=new))[0]
        found = await first.get(shared)
        assert found is not None
        assert found[0] == b"someUpdatedValue"
        # Who does not get it changes nothing.
        assert not (await first.set(lock, first.client_id, "NEX", px_ms=1000))[0]
        with pytest.raises(RefusedByStoreError):
            await first.set(shared, "late", ft=old)


@every_sdk
async def test_observing_a_lock(node: StoreNode, sdk: Profile) -> None:
    """.NET TestObserveLockChangedCallback, TestUnobserveLockChangedCallback, and the same of leadership."""
    async with SdkClient(node.port, sdk) as client:
        lock, holder = name(), name()
        await client.observe(lock)
        _, token = await client.set(lock, holder, "NEX", px_ms=60_000)
        acquired = await client.notice()
        assert (acquired.operation, acquired.value, acquired.version) == ("SET", holder.encode(), token)
        assert await client.vdelete(lock, holder) == 1
        assert (await client.notice()).operation == "DELETE"
        assert await client.unobserve(lock)
        assert (await client.set(lock, holder, "NEX", px_ms=100))[0]
        await client.vdelete(lock, holder)
        await client.settled()
        assert client.notices.empty()


@every_sdk
async def test_many_sdks_share_a_store(node: StoreNode, sdk: Profile) -> None:
    """Each observer hears of each other's changes, whatever SDK made them."""
    async with (
        SdkClient(node.port, sdk) as observer,
        SdkClient(node.port, GO) as go,
        SdkClient(node.port, DOTNET) as net,
    ):
        key = name()
        await observer.observe(key)
        await go.set(key, "go")
        await net.vdelete(key, "go")
        assert (await observer.notice()).value == b"go"
        assert (await observer.notice()).operation == "DELETE"


async def test_the_store_is_asked_while_a_command_is_carried_out(node: StoreNode) -> None:
    """Go TestStateStoreFromExecutor: one client executes commands over MQTT and asks the store before it answers.

    The request that it works on is not acknowledged yet and a second one waits behind it: the store's answer comes
    through all the same.
    """
    topic, key = f"executor/{name()}", name()
    async with (
        SdkClient(node.port, GO) as executor,
        SdkClient(node.port, GO, "invoker") as invoker,
        executor.mqtt.subscription(topic) as requests,
        invoker.mqtt.subscription(f"{topic}/response") as answers,
    ):
        for wanted in (key, name()):
            properties = Properties(response_topic=f"{topic}/response", correlation_data=uuid.uuid4().bytes)
            await invoker.mqtt.publish(topic, wanted.encode(), qos=1, properties=properties)
        async with asyncio.timeout(60):
            # A message is acknowledged when the next one is asked for.
            for _ in range(2):
                asked = await anext(requests)
                value = name()
                assert (await executor.set(asked.payload, value))[0]
                await executor.mqtt.publish(str(asked.properties.response_topic), value.encode(), qos=1)
            first = await anext(answers)
        found = await executor.get(key)
        assert found is not None
        assert found[0] == first.payload
        assert await executor.delete(key) == 1

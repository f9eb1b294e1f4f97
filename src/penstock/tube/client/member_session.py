"""A group member's session at its master: register, heartbeats, and the assignment of partitions to its fetcher.

Either the master assigns the partitions (:class:`Membership`), or the member chooses its own (:class:`ClientBalance`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, RefusedError
from penstock.runtime.io.clock import wall_clock_ms
from penstock.tube.addresses import Address
from penstock.tube.client.connection import MasterClient
from penstock.tube.client.fetcher import Fetcher
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2
from penstock.tube.engine.client.client_balance import ClientBalance
from penstock.tube.engine.client.consumer_group import Membership, Orders

__all__ = ["MemberSession"]

QUESTION_S = 10.0  # a member that balances itself asks so often which partitions there are
RETRY_S = 1.0


class MemberSession:
    """``refused(error)`` is called when the master does not want the member any more: its rights or its group changed.

    ``timeout_s``: how long one answer may take.
    """

    def __init__(
        self,
        masters: Sequence[Address],
        tls: ssl.SSLContext | None,
        member: Membership | ClientBalance,
        *,
        heartbeat_s: float,
        timeout_s: float,
        refused: Callable[[RefusedError], None],
    ) -> None:
        self._member = member
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._refused = refused
        self._master = MasterClient(masters, tls)
        self._wake = asyncio.Event()
        self._heart: asyncio.Task[None] | None = None

    async def start(self, fetcher: Fetcher) -> None:
        """Join the group, then send heartbeats; ``fetcher`` carries out the assignment.

        Raises:
            UnavailableError: no master answers.
            RefusedError: it does not want this member.
        """
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        member = self._member
        beating = self._choose(member, fetcher) if isinstance(member, ClientBalance) else self._follow(member, fetcher)
        self._heart = asyncio.create_task(beating, name=f"tube-consumer-{member.client_id}")

    def wake(self) -> None:
        """Send a heartbeat now: there is something to report, or the member has to choose anew."""
        self._wake.set()

    async def question(self, member: ClientBalance) -> Orders:
        """Ask which partitions there are. Raises PenstockError."""
        answer = await self._master.call(
            MethodId.GET_PARTITION_META, member.question(), master_pb2.GetPartMetaResponseM2C,
            timeout_s=self._timeout_s,
        )  # fmt: skip
        return member.told(answer, wall_clock_ms())

    async def stop(self) -> None:
        """Stop heartbeats."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)

    async def close(self) -> None:
        """Close the session; a master that does not receive this lets it expire."""
        with contextlib.suppress(PenstockError):
            await self._master.call(
                MethodId.CONSUMER_CLOSE, self._member.close(), master_pb2.CloseResponseM2C, timeout_s=2
            )
        await self._master.close()

    async def _register(self) -> None:
        member = self._member
        if isinstance(member, ClientBalance):
            own = await self._master.call(
                MethodId.CONSUMER_REGISTER_V2, member.register(), master_pb2.RegisterResponseM2CV2,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            self._check(own.errCode, own.errMsg)
            member.registered(own)
            return
        answer = await self._master.call(
            MethodId.CONSUMER_REGISTER, member.register(), master_pb2.RegisterResponseM2C, timeout_s=self._timeout_s
        )
        self._check(answer.errCode, answer.errMsg)
        member.registered(answer)

    def _check(self, code: int, text: str) -> None:
        if code != ErrCode.SUCCESS:
            raise RefusedError(
                f"tube: the master refuses consumer {self._member.client_id}: {text}",
                code=code,
                text=text,
                do=remedy(code),
            )

    async def _follow(self, member: Membership, fetcher: Fetcher) -> None:
        """Send heartbeats; carry the master's orders out and report at once."""
        while True:
            pause = self._heartbeat_s
            try:
                request = member.heartbeat()
                answer = await self._master.call(
                    MethodId.CONSUMER_HEARTBEAT, request, master_pb2.HeartResponseM2C, timeout_s=self._timeout_s
                )
                orders = member.heard(request, answer)
                if orders.register:
                    await self._register()
                    continue
                if orders.take or orders.release:
                    await fetcher.obey(orders)
                    member.finished()
                    continue
            except RefusedError as error:
                self._refused(error)
            except PenstockError:
                pause = min(pause, RETRY_S)
            await self._pause(pause)

    async def _choose(self, member: ClientBalance, fetcher: Fetcher) -> None:
        """Send heartbeats, sometimes ask which partitions exist, and hold the chosen ones."""
        loop = asyncio.get_running_loop()
        asked_at = -QUESTION_S
        while True:
            pause = self._heartbeat_s
            try:
                if loop.time() - asked_at >= QUESTION_S or not member.partitions():
                    asked_at = loop.time()
                    orders = await self.question(member)
                else:
                    answer = await self._master.call(
                        MethodId.CONSUMER_HEARTBEAT_V2, member.heartbeat(), master_pb2.HeartResponseM2CV2,
                        timeout_s=self._timeout_s,
                    )  # fmt: skip
                    orders = member.heard(answer, wall_clock_ms())
                if orders.register:
                    await self._register()
                    continue
                if orders.take or orders.release:
                    await fetcher.obey(orders)
                    member.changed()
            except RefusedError as error:
                self._refused(error)
            except PenstockError:
                pause = min(pause, RETRY_S)
            await self._pause(pause if member.partitions() else min(pause, RETRY_S))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

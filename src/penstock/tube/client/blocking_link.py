"""One blocking connection to a master or broker: one question at a time, up to a deadline."""

from __future__ import annotations

import itertools
import os
import random
import socket
import ssl
import time
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from penstock.errors import RefusedError, UnavailableError
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.network import rejected_by_alert, unanswered, unreachable
from penstock.runtime.io.tls import certificate_file
from penstock.security.tube_key import tube_key
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.envelope import Request, decode_response, encode_request, payload_of
from penstock.tube.codec.framing import FrameDecoder, encode_frame, one_block
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.schema import decode
from penstock.tube.engine.client.credentials import Credentials

__all__ = ["BlockingLink", "accepted", "client_id", "credentials_of"]

M = TypeVar("M", bound=Message)

_RECEIVE_BYTES = 256 << 10

_COUNTER = itertools.count(1)


class BlockingLink:
    """One blocking connection, one question at a time, up to ``deadline`` (monotonic seconds)."""

    def __init__(self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.peer = f"{host}:{port}"
        self.deadline = time.monotonic() + timeout_s
        self._tls = tls
        self._heard = False
        self._serial = 0
        self._decoder = FrameDecoder()
        self._buffer = bytearray(_RECEIVE_BYTES)
        """Used again: memory that is new for each answer costs more than the answer."""
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            why, do = unreachable(error, host, tls=False)
            raise UnavailableError(f"tube: no connection to {self.peer}", applied=False, why=why, do=do) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            try:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            except OSError as error:
                self._socket.close()
                alert = rejected_by_alert(error, certificate_file(tls))
                raise UnavailableError(
                    f"tube: no TLS with {self.peer}",
                    applied=False,
                    why=(alert or unreachable(error, host, tls=True)).why,
                    do="name the TLS port of the master (8716), and the authority of its certificate"
                    if alert is None
                    else alert.do,
                ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def call(self, service: int, method: MethodId, message: Message, kind: type[M]) -> M:
        """Ask, and wait for the answer, which is of ``kind``. Raises as :meth:`payload`."""
        return decode(kind, self.payload(service, method, message))

    def payload(self, service: int, method: MethodId, message: Message) -> bytes:
        """The answer to ``message``, encoded."""
        self.send(service, method, message)
        return self.receive(method)

    def send(self, service: int, method: MethodId, message: Message) -> None:
        """Ask; :meth:`receive` gives the answer to what was asked last."""
        left = self._left()
        self._serial += 1
        request = Request(self._serial, service, method, message.SerializeToString(), timeout=max(1, int(left * 1000)))
        try:
            self._socket.settimeout(left)
            self._socket.sendall(encode_frame(self._serial, encode_request(request)))
        except OSError as error:
            raise self._broken(error) from None

    def receive(self, method: MethodId) -> bytes:
        """The answer to the last :meth:`send`, encoded."""
        try:
            body = self._receive()
        except OSError as error:
            raise self._broken(error) from None
        return payload_of(decode_response(self._serial, body), method, self.peer)

    def _broken(self, error: OSError) -> UnavailableError:
        why, do = rejected_by_alert(error, certificate_file(self._tls)) or (str(error), None)
        return UnavailableError(f"tube: {self.peer} does not answer", why=why, do=do)

    def _receive(self) -> bytes | memoryview:
        """The frame body of the answer to the last question; to be used before the next."""
        while True:
            view = memoryview(self._buffer)
            have = self._read(view)
            frame = None if self._decoder.held else one_block(view[:have])
            if frame is not None and have <= frame[2]:
                serial, start, end = frame
                if end > len(view):
                    self._buffer = bytearray(end)
                    self._buffer[:have] = view[:have]
                    view = memoryview(self._buffer)
                while have < end:
                    have += self._read(view[have:end])
                if serial == self._serial:
                    return view[start:end]
                continue
            for serial, body in self._decoder.feed(bytes(view[:have])):
                if serial == self._serial:
                    return body

    def _read(self, view: memoryview) -> int:
        self._socket.settimeout(self._left())
        count = self._socket.recv_into(view)
        if not count:
            why, do = unanswered(tls=self._tls is not None) if not self._heard else (None, None)
            raise UnavailableError(f"tube: {self.peer} closed the connection", why=why, do=do)
        self._heard = True
        return count

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise UnavailableError(f"tube: {self.peer} did not answer in time")
        return left


def client_id(kind: str) -> str:
    """A name that no other client has, of any process or machine."""
    # Executors are many processes, maybe of one machine image: pid and time may be equal, so a random part is in it.
    number = f"{next(_COUNTER)}{random.randrange(1 << 32):08x}"  # noqa: S311 - distinct, not secret
    return f"127.0.0.1-{os.getpid()}-{wall_clock_ms()}-{number}-{kind}-penstock"


def credentials_of(user: str | None, password: str | None) -> Credentials | None:
    """What ``user`` shows; None without one."""
    if user is None:
        return None
    key = tube_key(user, (password or "").encode())
    return Credentials(user, key, wall_clock_ms, lambda: random.randrange(1 << 31))  # noqa: S311 - the protocol's


def accepted(code: int, text: str, peer: str) -> None:
    """Raises RefusedError unless a master answered with success."""
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: master {peer} refuses: {text}", code=code, text=text, peer=peer, do=remedy(code))

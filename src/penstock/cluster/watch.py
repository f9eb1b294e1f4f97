"""Watch of keys in etcd as a hint that one of them has changed.

A watch may miss changes: its member is stopped, an event is lost (etcd 3.4.23), or etcd was restored from a backup. The
owner therefore also reads the keys at intervals.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from penstock.cluster.client import EtcdClient, Watch
from penstock.cluster.grpc_import import grpc
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError
from penstock.runtime.backoff import Backoff

__all__ = ["KeyWatch"]

_REOPEN_S = 0.1, 1.0
"""Shortest and longest pause before a watch that has ended is opened again."""
_STAY_OPEN_S = 1.0

_log = logging.getLogger("penstock.cluster")


class KeyWatch:
    """Calls ``changed`` in a thread whenever one of ``keys`` is put or deleted. Must be closed."""

    def __init__(self, client: EtcdClient, keys: Sequence[bytes], changed: Callable[[], object]) -> None:
        self._client = client
        self._keys = keys
        self._changed = changed
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="cluster watch", daemon=True)
        self._thread.start()

    def follow_endpoint(self) -> None:
        """Move the watch to the current endpoint of the client: at the previous one it may stay open without events.

        Call it after reads, which leave an endpoint that does not answer.
        """
        watch = self._watch
        if watch is not None and (self._closed.is_set() or watch.endpoint != self._client.endpoint):
            watch.cancel()

    def close(self) -> None:
        """Stop watching; from any thread."""
        self._closed.set()
        self.follow_endpoint()
        self._thread.join()

    def _run(self) -> None:
        pauses = Backoff(*_REOPEN_S)
        while not self._closed.is_set():
            ended = threading.Event()
            why: object = "etcd has ended it"
            try:
                watch = self._watch = self._client.watch(self._requests(ended))
                self.follow_endpoint()
                for response in watch.responses:
                    if response.canceled:
                        why = response.cancel_reason or why
                        break
                    pauses.reset()
                    if response.events:
                        self._changed()
            except grpc.RpcError as error:
                moves = error.code() is grpc.StatusCode.CANCELLED  # by follow_endpoint()
                why = "it moves to the member that the client uses" if moves else error.details()
            except PenstockError as failure:
                why = failure.what
            ended.set()
            pause_s = pauses.failed()
            if pauses.failures == 1 and not self._closed.is_set():  # later ones would fill the log
                _log.info("the watch of the cluster is opened again: %s", why)
            self._closed.wait(pause_s)

    def _requests(self, ended: threading.Event) -> Iterator[pb.WatchRequest]:
        """Requests of one watch, which stays open until it has ``ended``."""
        for key in self._keys:
            yield pb.WatchRequest(create_request=pb.WatchCreateRequest(key=key))
        while not ended.wait(_STAY_OPEN_S) and not self._closed.is_set():
            pass

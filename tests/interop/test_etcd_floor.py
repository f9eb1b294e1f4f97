"""Commits to etcd without a node, and a server that makes them, for the benchmark of a cluster."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import generator
from benchmarks.bare_commits import BareCommits, read_totals
from benchmarks.floor import ETCD_PREFIX, FRAME_BYTES, SET_BYTES, etcd_floor
from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from tests.interop.etcd import EtcdCluster
from tests.tools import skip_or_fail


def test_bare_commits_put_their_bytes_and_refuse_a_foreign_head(three: EtcdCluster) -> None:
    client = EtcdClient(three.endpoints)
    commits = BareCommits(three.endpoints, "bare")
    for size in (100, 50, 0):
        commits.commit(size)
    first = pb.RangeRequest(key=b"bare/frame/", range_end=b"bare/frame0")
    assert [len(found.value) for found in client.call("KV/Range", first, pb.RangeResponse).kvs] == [100, 50, 0]
    totals = read_totals(client, "bare")
    assert (totals.commits, totals.size) == (3, 150)
    assert totals.seconds > 0, "those of the commits before the last one"
    client.call("KV/Put", pb.PutRequest(key=b"bare/head", value=b"of another client"), pb.PutResponse)
    with pytest.raises(AssertionError):
        commits.commit(10)
    commits.close()
    assert not client.call("KV/Range", first, pb.RangeResponse).kvs
    client.close()


@pytest.mark.nightly
def test_the_floor_answers_the_load_generator_after_commits(three: EtcdCluster) -> None:
    if shutil.which("cargo") is None:
        skip_or_fail(f"no load generator: {generator.missing()}")
    generator.command()
    client = EtcdClient(three.endpoints)
    with etcd_floor(three.endpoints) as (address, pid):
        generator.measure(address, "statestore", pid=pid, op="set", clients=3, keys=10, seconds=3)
        totals = read_totals(client, ETCD_PREFIX)
    client.close()
    assert totals.commits > 0
    assert totals.size >= totals.commits * (FRAME_BYTES + SET_BYTES), "each commit has a SET"

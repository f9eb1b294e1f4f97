"""The program of the page about the options of all formats, in the session of the suite."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import penstock.spark
from tests.docs.pages import ROOT, blocks
from tests.spark.node import Node
from tests.spark.pipelines import Shared


def test_the_program_of_the_page_succeeds(spark: SparkSession, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """By night the whole page is followed, with a node and a session of its own."""
    (program,) = (block for block in blocks(ROOT / "docs/reference/spark-options.md") if block.language == "python")
    node.create_topic("readings", 1)
    monkeypatch.setenv("PENSTOCK_TUBE_MASTER", node.master)
    monkeypatch.setenv("PENSTOCK_BROKER", node.mqtt)
    monkeypatch.setattr(penstock.spark, "session", lambda _name: Shared(spark))
    exec(compile(program.text, "spark-options.md", "exec"), {})
    retained = {message.topic: message.payload for message in node.retained("newest/#", 2)}
    assert retained.keys() == {"newest/press-1", "newest/press-2"}
    assert b"61.5" in retained["newest/press-1"]

"""Pipeline files as text, small ones, with one place changed."""

from __future__ import annotations

from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline

__all__ = ["FILE", "parse"]

FILE = """\
name: water
source: {topics: [water_flow]}
dead_letters: {path: lake/dead}
steps:
  - name: parsed
    parse: {schema: "branch STRING NOT NULL, time TIMESTAMP NOT NULL, flow DOUBLE"}
  - name: plausible
    filter: flow >= 0
  - name: once
    dedupe: {within: 1 day}
  - name: once_in_time
    from: plausible
    dedupe: {on: event}
  - name: stretches
    window: {time: time, duration: 3 hours, watermark: 6 hours, by: [branch], aggregates: {n: count(*)}}
sinks:
  - name: rows
    from: once
    table: {path: lake/rows}
  - name: alarms
    statestore: {entries: [{key: "alarm/{branch}"}]}
"""


def parse(text: str = FILE, **environment: str) -> Pipeline:
    """``text`` as a pipeline file called ``p.yaml``."""
    return loader.parse(text, name="p.yaml", environment=environment)

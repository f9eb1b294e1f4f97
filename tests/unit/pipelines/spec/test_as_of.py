"""As-of joins in a pipeline file."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.description import as_data
from penstock.pipelines.spec.pipeline import Pipeline, plan
from penstock.pipelines.state_dir.changes import history_of

FILE = """\
name: p
source: {source}
steps:
  - name: parsed
    parse: {{schema: "line STRING, at TIMESTAMP, day DATE"}}
  - name: made
    enrich:
      {{key: "re[c]ipe/{{line}}", as: recipe, schema: id INT, as_of: {{time: {time}, topic: changes{more}}}{other}}}
sinks: [{{name: rows, console: {{}}}}]
"""


def parsed(source: str = "{topics: [t]}", time: str = "at", more: str = "", other: str = "") -> Pipeline:
    return loader.parse(FILE.format(source=source, time=time, more=more, other=other), name="p.yaml")


def test_topic_and_keys() -> None:
    source = "{topics: [t], master: 'h:1', options: {tubemq.user: u, tubemq.passwordFile: f}}"
    pipeline = parsed(source, more=", history: 2 days")
    (found,) = plan(pipeline)
    ((step, enrich),) = found.as_of_joins.items()
    assert (step, enrich.keys) == ("made", "re[[]c]ipe/*")
    assert enrich.as_of is not None
    options = pipeline.change_options(enrich.as_of)
    login = {"tubemq.user": "u", "tubemq.passwordFile": "f"}
    assert options == {"tubemq.master": "h:1", "subscribe": "changes", **login}
    assert pipeline.change_options(enrich.as_of.model_copy(update={"master": "other:1"})) == {
        "tubemq.master": "other:1",
        "subscribe": "changes",
    }
    (other,) = plan(parsed(more=", master: 'h:2'"))[0].as_of_joins.values()
    assert history_of(step, enrich) != history_of(step, other)
    text = str(as_data(pipeline))
    assert "with the value that key re[c]ipe/{line} had at at as recipe" in text
    assert "changes of 2 days are kept" in text


@pytest.mark.parametrize(
    ("given", "location", "expected"),
    [
        ({"time": "other"}, "as_of.time", "expected a column of 'parsed'"),
        ({"time": "day"}, "as_of.time", "expected a column of type TIMESTAMP; day is DATE"),
        ({"source": "{format: rate}"}, "as_of", "expected master, since no source reads TubeMQ"),
        ({"more": ", master: nowhere"}, "as_of.master", "nowhere"),
        ({"other": ", refresh: 1 second"}, "enrich", "expected no refresh with as_of"),
        ({"other": ", match: {a: line}"}, "enrich", "expected no match with as_of"),
        ({"more": ", history: long"}, "history", "expected a duration"),
    ],
)
def test_refused(given: dict[str, str], location: str, expected: str) -> None:
    with pytest.raises(ConfigError) as found:
        parsed(**given)
    assert location in str(found.value)
    assert expected in str(found.value)

"""The model of a pipeline file, checked without Spark.

``load`` gives a ``Pipeline`` whose references are known to hold: every step reads one that stands before it, names are
unique, durations are durations. What only Spark can know (a column that an expression names) is found when the
pipeline is built, before anything is read.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.pipelines.spec.sinks import Sink, TubeSink
from penstock.pipelines.spec.sources import SOURCE, Source, TubeOptions, as_texts
from penstock.pipelines.spec.steps import Step
from penstock.pipelines.spec.values import BrokerUrl, Duration, Name, Part

__all__ = ["DeadLetters", "Pipeline", "StateStore"]


class StateStore(Part):
    """The MQTT broker that the state store answers on."""

    broker: BrokerUrl = Field(
        default="mqtt://127.0.0.1:1883",
        description="if left out, the variable PENSTOCK_BROKER counts before this default",
    )


class DeadLetters(Part):
    """The Parquet table of records that could not be processed: reason, coordinates, headers, original bytes."""

    path: str = Field(min_length=1, description="directory of the table")


class Pipeline(Part):
    """One pipeline file."""

    name: Name = Field(
        description="name of the pipeline: lease, default state directory and consumer group depend on it"
    )
    source: Source | None = Field(default=None, description="the source, if there is one; its stream is named `source`")
    sources: dict[Name, Source] = Field(
        default_factory=dict, description="several sources by name; steps select one with `from`"
    )
    statestore: StateStore = Field(
        default=StateStore(), description="the state store: lease of the run, lookups, write-back"
    )
    trigger: Duration = Field(
        default="500 milliseconds", description="how often a batch is started if there are new records"
    )
    steps: list[Step] = Field(default_factory=list, description="transformations, in order")
    sinks: list[Sink] = Field(min_length=1, description="targets; each has its own query and checkpoint")
    dead_letters: DeadLetters | None = Field(
        default=None, description="table of records that could not be processed; without it they are counted only"
    )

    @property
    def inputs(self) -> dict[str, Source]:
        """The sources by the names that steps know them by."""
        return dict(self.sources) if self.source is None else {SOURCE: self.source}

    @property
    def master(self) -> str | None:
        """Masters of the first source that reads TubeMQ: the default of sinks."""
        return next((source.master for source in self.inputs.values() if isinstance(source, TubeOptions)), None)

    def tube_options(self, sink: TubeSink) -> dict[str, str]:
        """Return the address and login options for ``sink``, by default those of the source with the same master.

        They have no master if neither the sink nor a source names one.
        """
        master = sink.master or self.master
        same = (s.login() for s in self.inputs.values() if isinstance(s, TubeOptions) and s.master == master)
        given = as_texts(sink.options) if sink.options else next(same, {})
        return given if master is None else {"tubemq.master": master, **given}

    @model_validator(mode="after")
    def _one_way_to_name_sources(self) -> Pipeline:
        if (self.source is None) == (not self.sources):
            raise ValueError("expected exactly one of source, sources")
        return self

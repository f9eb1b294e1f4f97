"""Permitted imports (CONTRIBUTING.md has the table in words), checked on the syntax trees."""

from __future__ import annotations

import graphlib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.sources import SOURCE, modules, read

IMPURE = frozenset(
    {
        "asyncio",
        "datetime",
        "http",
        "logging",
        "lmdb",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "pyarrow",
        "pydantic",
    }
    | {"pyspark", "queue", "random", "rich", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl"}
    | {"starlette", "subprocess", "tempfile", "threading", "time", "typer", "urllib", "uuid", "uvloop"}
)
IO = frozenset({"asyncio", "socket", "ssl", "uvloop"})
SPARK = frozenset({"pyspark", "pyarrow", "pandas"})
SPARKPLUG = ("mqtt.sparkplug", "mqtt.proto")
STORE = ("statestore.client", "statestore.errors", "statestore.hlc")


class Rule(NamedTuple):
    """One row: modules below ``package`` may import penstock modules below ``own`` and never the names in ``never``."""

    package: str
    own: tuple[str, ...]
    never: frozenset[str] = frozenset()


# The longest matching package decides; what is in OPEN may be imported by all.
OPEN = ("__version__", "compiled", "errors", "runtime.backoff", "runtime.turns")
RULES = [
    Rule("penstock.errors", (), IMPURE),
    Rule("penstock.mqtt.codec", ("mqtt.codec",), IMPURE),
    Rule("penstock.mqtt.engine", ("mqtt.codec", "mqtt.engine", "mqtt.service"), IMPURE),
    # The layers of the engine, each above those that it may import; broker and outlet are above all of them.
    *(
        Rule(
            f"penstock.mqtt.engine.{layer}",
            ("mqtt.codec", *(f"mqtt.engine.{below}" for below in (layer, *lower)), *own),
            IMPURE,
        )
        for layer, lower, own in (
            ("model", (), ()),
            ("routing", ("model",), ("mqtt.service",)),
            ("sessions", ("model", "routing"), ("mqtt.service",)),
            ("connections", ("model", "routing", "sessions"), ("mqtt.service",)),
            ("client", ("model",), ()),
        )
    ),
    Rule("penstock.mqtt.service", ("mqtt.codec",), IMPURE),
    Rule("penstock.mqtt.storage", ("mqtt.codec", "mqtt.engine", "mqtt.storage", "runtime"), IO | SPARK),
    Rule("penstock.mqtt", ("mqtt", "runtime", "security"), SPARK),
    Rule("penstock.statestore.codec", ("statestore.codec", "statestore.hlc"), IMPURE),
    Rule("penstock.statestore.hlc", (), IMPURE),
    Rule("penstock.statestore.engine", ("statestore.codec", "statestore.engine", "statestore.hlc"), IMPURE),
    Rule(
        "penstock.statestore.binding", ("statestore.codec", "statestore.engine", "statestore.hlc", "mqtt.codec"), IMPURE
    ),
    Rule("penstock.statestore.service.storage", ("statestore", "runtime"), IO | SPARK),
    Rule(
        "penstock.statestore",
        (
            "statestore",
            "runtime",
            "security",
            "mqtt.client",
            "mqtt.service",
            "mqtt.codec.packets",
            "mqtt.codec.reasons",
        ),
        SPARK,
    ),
    Rule("penstock.tube.codec", ("tube.codec",), IMPURE),
    Rule("penstock.tube.record", ("tube.codec",), IMPURE),
    Rule("penstock.tube.engine", ("tube.codec", "tube.engine"), IMPURE),
    # By role: each imports the shared modules, and only transactions another role. `broker_engine` wires the broker.
    *(
        Rule(
            f"penstock.tube.engine.{role}",
            (
                "tube.codec",
                "tube.engine.access",
                "tube.engine.interfaces",
                "tube.engine.limits",
                "tube.engine.sessions",
                *(f"tube.engine.{name}" for name in names),
                *data,
            ),
            IMPURE,
        )
        for role, names, data in (
            ("access", (), ()),
            ("sessions", (), ()),
            ("interfaces", (), ()),
            ("limits", (), ()),
            ("client", ("client",), ("tube.record",)),
            ("master", ("master",), ()),
            ("broker", ("broker",), ()),
            ("transactions", ("broker", "transactions"), ()),
        )
    ),
    Rule("penstock.tube.admin", ("tube.admin", "tube.codec", "tube.engine", "tube.record"), IMPURE - {"datetime"}),
    Rule("penstock.tube.storage", ("tube.codec", "tube.engine.interfaces", "tube.storage", "runtime"), IO | SPARK),
    Rule("penstock.tube", ("tube", "runtime", "security"), SPARK),
    Rule("penstock.runtime.backoff", (), IMPURE),
    Rule("penstock.runtime.turns", (), IMPURE),
    Rule("penstock.runtime", ("runtime",), SPARK),
    Rule("penstock.security", ("security", "runtime.config"), IO | SPARK),
    Rule("penstock.cluster", ("cluster", "runtime"), SPARK | {"asyncio", "socket", "uvloop"}),
    *(Rule(f"penstock.cluster.{module}", (), IMPURE) for module in ("commit", "lease", "retention")),
    Rule("penstock.payloads", ("payloads",), SPARK | IO),
    Rule("penstock.console.snapshots", (), IMPURE),
    Rule("penstock.console", ("console", "mqtt", "payloads", "statestore", "tube", "runtime"), SPARK),
    Rule(
        "penstock.node",
        ("node", "cluster", "console", "mqtt", "payloads", "statestore", "tube", "runtime", "security"),
        SPARK,
    ),
    Rule(
        "penstock.spark",
        (
            *("spark", "tube.client", "tube.reader"),
            *("tube.producer", "tube.record", "tube.exactly_once", "tube.codec.message", "tube.codec.strings"),
            *("runtime.config.values", "runtime.extras", "runtime.io.loop", "runtime.io.network"),
            *("runtime.io.tls", "runtime.kafka"),
            *("statestore.client", "statestore.errors", "statestore.codec.glob", "statestore.hlc"),
            *("mqtt.client", "mqtt.codec.properties", "mqtt.codec.topics", "mqtt.url"),
        ),
    ),
    # The layers of a pipeline, each above those that it may import.
    *(
        Rule(f"penstock.pipelines.{layer}", (*(f"pipelines.{below}" for below in (layer, *lower)), *public), never)
        for layer, lower, public, never in (
            (
                "spec",
                (),
                # The tables of options, whose names the JSON Schema has.
                (
                    "payloads",
                    *("mqtt.url", "runtime.config", "runtime.io.network", "runtime.io.tls", "runtime.kafka"),
                    *("spark.files.feed_options", "spark.files.object_storage", "spark.mqtt.options"),
                    *("spark.option_parsing", "spark.tube.options"),
                    *("spark.postgresql.columns", "spark.postgresql.connection"),
                ),
                SPARK | IO,
            ),
            (
                "state_dir",
                ("spec",),
                ("spark.files.object_storage", "spark.tube.offsets", "statestore.hlc"),
                SPARK | IO,
            ),
            ("rows", ("spec",), ("spark.files.feed_options", "spark.tube.options"), IO),
            ("catalyst", (), (), IO),
            (
                "steps",
                ("catalyst", "spec", "rows", "state_dir"),
                ("payloads", "spark", "runtime.kafka", *SPARKPLUG),
                IO,
            ),
            ("sources", ("catalyst", "spec", "rows", "state_dir"), ("spark",), IO),
            (
                "sinks",
                ("catalyst", "spec", "rows", "state_dir", "steps"),
                ("payloads", "spark", "runtime.kafka"),
                IO,
            ),
            (
                "ledger",
                ("spec", "sinks.parquet", "sinks.registered_values", "sinks.table", "sources", "state_dir"),
                ("spark", "statestore.hlc", "tube.producer", "tube.record"),
                IO,
            ),
            (
                "testing",
                ("catalyst", "spec", "rows", "sinks", "sources", "state_dir", "steps"),
                ("spark", "runtime.config", "runtime.io.process_end"),
                IO,
            ),
            ("export", ("spec", "rows"), ("runtime.config", "spark.environment.jars"), IO),
            (
                "run",
                ("catalyst", "ledger", "spec", "rows", "sinks", "sources", "state_dir", "steps"),
                (
                    *("spark", "runtime.io.clock", "runtime.io.loop", "runtime.io.network"),
                    *("runtime.kafka", "runtime.observability.metrics", "runtime.observability.tracing", *STORE),
                ),
                IO,
            ),
        )
    ),
    # Its files are Arrow's.
    Rule(
        "penstock.pipelines.state_dir.changes",
        ("pipelines.spec", "pipelines.state_dir", "spark.files.object_storage"),
        IO | {"pyspark", "pandas"},
    ),
    Rule(
        "penstock.pipelines.state_dir.deadbands",
        ("pipelines.spec", "pipelines.state_dir", "spark.files.object_storage"),
        IO | {"pyspark", "pandas"},
    ),
    # Lease and write-back are clients of the state store in an event loop of their own; nothing else of a run is.
    *(
        Rule(
            f"penstock.pipelines.run.{module}",
            (
                *("pipelines.run.lease", "pipelines.spec", "runtime.io.loop", "runtime.io.network"),
                *("spark.statestore.writes", *STORE),
            ),
            SPARK,
        )
        for module in ("lease", "write_back")
    ),
    Rule("penstock.pipelines", ("pipelines",)),
    Rule(
        "penstock.demo",
        (
            "demo",
            "mqtt.client",
            "mqtt.codec.properties",
            "statestore",
            "tube",
            "spark",
            "pipelines",
            "runtime",
        ),
    ),
    Rule("penstock.cli", ("",)),
    Rule("penstock", ("",)),
]


def rule_for(module: str) -> Rule:
    return next(
        rule
        for rule in sorted(RULES, key=lambda rule: -len(rule.package))
        if module == rule.package or module.startswith(rule.package + ".")
    )


def below(name: str, package: str) -> bool:
    return package in ("", name) or name.startswith(package + ".")


@pytest.mark.parametrize(("module", "path"), [m for m in modules() if m[0].startswith("penstock")], ids=str)
def test_module_imports_only_what_its_layer_may(module: str, path: Path) -> None:
    rule = rule_for(module)
    wrong = []
    for line, name in read(path).imports:
        if name.startswith("penstock."):
            target = name.removeprefix("penstock.")
            if not any(below(target, package) for package in (*OPEN, *rule.own)):
                wrong.append(f"{module}:{line} imports {name}: {rule.package} may import {', '.join(rule.own)}")
        elif name.split(".")[0] in rule.never:
            wrong.append(f"{module}:{line} imports {name}, which {rule.package} never does")
    assert not wrong, "\n".join(wrong)


def test_only_cli_demo_and_testing_import_the_node() -> None:
    wrong = [
        f"{module}:{line}"
        for module, path in modules()
        for line, name in read(path).imports
        if below(name, "penstock.node") and not module.startswith(("penstock.node", "penstock.cli", "penstock.testing"))
    ]
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {module for module, _ in modules()}
    graph = {
        module: {name if name in names else name.rpartition(".")[0] for name in read(path).at_import}
        & (names - {module})
        for module, path in modules()
    }
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the modules in their order


def test_spark_internals_are_used_in_one_module() -> None:
    """A new version of Spark is looked through there: its classes in the JVM are no public interface."""
    inside = {"_jvm", "_jdf", "_jc", "_jsc", "_gateway", "_jsparkSession", "_jreader", "_jwrite", "_jsq", "_jconf"}
    found = {
        path.relative_to(SOURCE / "penstock").as_posix()
        for path in (SOURCE / "penstock").rglob("*.py")
        if inside & read(path).attributes
    }
    assert found == {"pipelines/catalyst.py"}

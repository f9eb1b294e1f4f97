"""`penstock pipeline`: check, run and account for pipelines."""

from __future__ import annotations

from penstock.cli.options import Commands
from penstock.cli.pipeline import apply, export, files, ledger, run, sample, submit, tables

__all__ = ["app"]

app = Commands("Check, run and account for pipelines.")
app.add(
    "penstock pipeline init",
    "penstock pipeline init line3.yaml --name line3 --source mqtt",
    "penstock pipeline init line3.yaml --topic telemetry",
)(files.init)
app.add(
    "penstock pipeline infer samples.jsonl > readings.ddl",
    "penstock pipeline infer - --nullable < samples.jsonl",
    "penstock pipeline infer --topic telemetry > readings.ddl",
    "penstock pipeline infer --pipeline from_kafka.yaml > readings.ddl",
    "penstock pipeline infer --registry http://registry:8081 --subject plant-value",
)(files.infer)
app.add("penstock pipeline validate pipeline.yaml", "penstock pipeline validate *.yaml --json")(files.validate)
app.add("penstock pipeline plan pipeline.yaml", "penstock pipeline plan pipeline.yaml --mermaid", name="plan")(
    files.show_plan
)
app.add("penstock pipeline schema > pipeline.schema.json")(files.schema)
app.add("penstock pipeline test pipeline.yaml", "penstock pipeline test pipeline.yaml --case hot", name="test")(
    files.run_cases
)
app.add("penstock pipeline sample pipeline.yaml", "penstock pipeline sample pipeline.yaml --step readings --limit 20")(
    sample.sample
)
app.add(
    "penstock pipeline run pipeline.yaml",
    "penstock pipeline run pipeline.yaml --once",
    "penstock pipeline run pipelines/ --metrics 127.0.0.1:9108",
    "penstock pipeline run pipeline.yaml --from 2024-05-01 --into replay",
)(run.run)
app.add(
    "penstock pipeline apply pipeline.yaml",
    "penstock pipeline apply pipeline.yaml --dry-run",
    "penstock pipeline apply line3 --rollback",
)(apply.apply)
app.add("penstock pipeline stop pipeline.yaml", "penstock pipeline stop line3 --broker mqtts://node.example")(run.stop)
app.add("penstock pipeline warm-up", name="warm-up")(run.warm_up)
app.add(
    "penstock pipeline submit line3.yaml --spark-master yarn --state-dir /shared",
    "penstock pipeline submit line3.yaml --spark-master yarn --deploy-mode cluster",
)(submit.submit)
app.add(
    "penstock pipeline package line3.yaml --spark-master yarn --state-dir /shared",
    "penstock pipeline package line3.yaml --spark-master yarn --deploy-mode cluster",
)(submit.package)
app.add(
    "penstock pipeline export pipeline.yaml",
    "penstock pipeline export pipeline.yaml --as declarative --table-format parquet",
    name="export",
)(export.export)
app.add("penstock pipeline status pipeline.yaml", "penstock pipeline status pipeline.yaml --watch 5s")(ledger.status)
app.add("penstock pipeline reconcile pipeline.yaml")(ledger.reconcile)
app.add("penstock pipeline migrate pipeline.yaml --dry-run", "penstock pipeline migrate pipeline.yaml --sink readings")(
    tables.migrate
)
app.add("penstock pipeline maintain pipeline.yaml", "penstock pipeline maintain pipeline.yaml --retention 1d")(
    tables.maintain
)
app.groups["dead-letter"] = ledger.app

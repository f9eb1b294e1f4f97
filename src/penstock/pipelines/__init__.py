"""Pipelines: one YAML file, compiled to Structured Streaming, from the log to lake tables and the state store.

`spec` is the file as data, `sources`, `steps` and `sinks` are the parts of a query, `ledger` accounts for its records,
and `run` starts queries and processes batches. `rows` has the metadata columns with which all of them mark rows.
"""

"""Pipelines: one YAML file, compiled to Structured Streaming, from the log to lake tables and the state store."""

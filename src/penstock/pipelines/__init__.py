"""Pipelines: one YAML file from the tube log to lake tables and the state store, compiled to Structured Streaming."""

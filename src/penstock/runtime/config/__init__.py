"""Configuration files: YAML with line numbers into typed models."""

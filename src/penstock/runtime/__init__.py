"""Infrastructure that every server and client shares: IO, configuration, logs and metrics. No domain is imported."""

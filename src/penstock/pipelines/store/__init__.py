"""The state store as a pipeline uses it: its lease, its fenced writes, its record of the run."""

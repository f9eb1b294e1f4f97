"""Run a pipeline: start its queries, process batches, report progress, hold the lease, and write back with its fencing
token."""

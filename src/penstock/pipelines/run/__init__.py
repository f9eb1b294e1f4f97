"""Run a pipeline: start its queries, process batches, report progress, hold the lease, write back with its token."""

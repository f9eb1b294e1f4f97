"""Run a pipeline: start its queries, process batches, report progress, hold the lease, and write back with its
fencing token.

Read `run` first, then `supervision` (starts and restarts of queries), `queries` (a query with one sink) and `shared`
(a query with several).
"""

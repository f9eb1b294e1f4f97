"""Simulation of two nodes of a cluster with a model of etcd, in one thread with virtual time: one seed determines all.

Read `run` first (schedule and faults), then `history` (the rules), `node` (what of a node is real), `etcd` (the model)
and `threads` (processes and threads with virtual time). ``python -m tests.simulation.cluster 17-17`` repeats a seed.
"""

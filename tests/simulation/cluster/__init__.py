"""Simulation of two nodes of a cluster with a model of etcd, in one thread with virtual time: one seed determines all.

Read `run` first (schedule and faults), then `history` (the rules), `node` (what of a node is real), `etcd` (the model)
and `threads` (processes and threads with virtual time). There the service of a node is small, so that many seeds are
cheap. Whole nodes, with the MQTT broker and the state store of production, are in `mqtt_run`, `mqtt_node`, `loop` and
`mqtt_history`; their clients and most rules are those of :mod:`tests.simulation`. ``python -m tests.simulation.cluster
17-17`` repeats a seed, with ``--whole`` of whole nodes.
"""

"""Deterministic simulation of whole nodes: one process, one thread, one seed.

``loop`` is the event loop with virtual time, ``disk`` the files and LMDB tables that lose what was not synced, ``node``
a broker with its state store on both, ``history`` the rules that every answer must obey, and ``run`` the clients, the
faults and the search for a short schedule. The production code is unchanged, in either form of the core.

A seed determines everything: no module here reads a clock, the system's randomness, or the order of a set of strings.
"""

"""Deterministic simulation of whole nodes: one process, one thread, one seed.

``loop`` is the event loop with virtual time and the clocks of the machine, ``disk`` the files and LMDB tables that lose
what was not synced, ``node`` a broker with sessions and state store on both. ``statestore_client`` and ``mqtt_client``
are the clients, ``history`` and ``mqtt_history`` the rules that everything they see must obey, ``run`` the schedules
with their faults, and the search for a short one. ``mutations`` are bugs that must be found. The production code is
unchanged, in either form of the core.

A seed determines everything: no module here reads a clock, the system's randomness, or the order of a set of strings.
"""

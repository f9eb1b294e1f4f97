"""Deterministic simulation of whole nodes: one process, one thread, one seed.

``loop`` is the event loop with virtual time and the clocks of the machine, ``network`` its connections, ``disk`` the
files and LMDB tables that lose what was not synced, ``node`` a node on them: MQTT broker, state store, TubeMQ's master
and broker, and HTTP. ``statestore_client``, ``mqtt_client``, ``tube_client`` and ``http_client`` are the clients;
``history``, ``mqtt_history``, ``tests.histories.tube`` and ``http_client`` the rules that everything they see must
obey, ``node`` the shares of a loop turn; ``run`` the schedules with their faults, and the search for a short one.
``mutations`` are bugs that must be found. The production code is unchanged, in either form of the core.

A seed determines everything: no module here reads a clock, the system's randomness, or the order of a set of strings.
"""

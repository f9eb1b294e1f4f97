"""Snapshots of a running node for operators: health, backlogs, connected clients, stored data.

``snapshots`` has the types, which the HTTP API, the command line and the web console share; ``pages`` cursor pages over
long lists; ``events`` the latest events; ``rates`` counters sampled once a second; ``mqtt``, ``statestore``,
``tube`` and ``cluster`` read the parts of the node; ``console`` combines them. Views change nothing, except that
``tube`` resets offsets, and lists are read in shares: see ``pages``.
"""

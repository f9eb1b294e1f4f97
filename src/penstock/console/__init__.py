"""Snapshots of a running node for people: what works, what waits, who is connected, what is stored.

``snapshots`` has the types, which the HTTP API, the command line and the web console share; ``pages`` cursor pages over
long lists; ``events`` what happened last; ``rates`` counters sampled once a second; ``mqtt``, ``statestore`` and
``tube`` read the parts of the node; ``console`` joins them. Nothing here changes a part, and no list is read in one
piece: see ``pages``.
"""

"""Parts of producers, consumers and readers: connections, sessions at the master, sending and fetching.

The rules without IO are in :mod:`penstock.tube.engine.client`; read :mod:`.connection` first.
"""

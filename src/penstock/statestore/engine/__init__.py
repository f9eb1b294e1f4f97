"""The state store without sockets, disk or clock: keys, versions, fences, expiry, observers."""

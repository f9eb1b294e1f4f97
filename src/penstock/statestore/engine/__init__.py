"""State store engine without sockets, disk or clock: keys, versions, fences, expiry, observers."""

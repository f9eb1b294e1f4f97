"""The append-only log of a broker: files and memory, without sockets and event loop. Start with `store`."""

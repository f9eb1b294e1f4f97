"""The tube's append-only log: files and memory, no sockets, no loop."""

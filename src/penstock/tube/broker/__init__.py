"""The broker server: connections, commits, maintenance of its logs, connection to a master. Start with `broker`."""

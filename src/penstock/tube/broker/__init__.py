"""The broker's shell: connections, commits, upkeep of its logs, membership at a master."""

"""The broker's shell: connections, commits, maintenance of its logs, membership at a master."""

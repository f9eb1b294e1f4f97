"""``format("aio-statestore")`` and lookups: the state store source and sink."""

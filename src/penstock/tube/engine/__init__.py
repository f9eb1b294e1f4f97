"""TubeMQ as state machines without IO, by role: master, broker, transactions, client."""

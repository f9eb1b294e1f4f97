"""Sans-IO state machines of TubeMQ by role: master, broker, transactions, client."""

"""The service of the state store: executes requests of a broker's clients, and sends answers and notifications after
the commit."""

"""The state store at a broker: executes requests, and sends answers and notifications after the commit."""

"""Listeners and connections of the broker: TCP, TLS, WebSocket, connection limits. Read ``listener`` first."""

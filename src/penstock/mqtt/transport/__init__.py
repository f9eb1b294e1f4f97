"""What lies between the network and the broker: listeners, TCP, TLS, WebSocket, and who may come in at all."""

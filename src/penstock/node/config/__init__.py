"""Configuration of a node: ``node`` loads ``penstock.yaml``, the other modules are its sections."""

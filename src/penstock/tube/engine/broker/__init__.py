"""The broker's side of the protocol, one module per subject; `engine.broker_engine` dispatches requests to them."""

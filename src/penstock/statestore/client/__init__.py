"""The client's side of the state store: requests, observations, locks, leader election."""

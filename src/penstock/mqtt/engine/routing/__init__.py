"""Routing: the subscriptions and services that receive a topic."""

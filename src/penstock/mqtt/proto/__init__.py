"""Sparkplug B's payload as Protobuf messages; ``make proto`` generates the modules."""

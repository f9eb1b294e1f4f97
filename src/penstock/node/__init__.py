"""`penstock up`: every part of penstock in one process, under one configuration and one data directory."""

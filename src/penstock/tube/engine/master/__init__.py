"""The master as a state machine: `master.MasterEngine` dispatches to one handler per kind of peer; start there."""

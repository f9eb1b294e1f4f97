"""state_dir."""

"""A run: queries built, started, watched and stopped; its progress, its metrics, its submission to a cluster."""

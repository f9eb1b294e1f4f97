"""The topics of Apache's master: named before its brokers register, so that they share one activation."""

__all__ = ["OURS", "THEIRS"]

THEIRS = (
    "pulled",
    "filtered",
    "shared",
    "large",
    "balanced",
    "bound",
    "quick",
    "ranges",
    "follow",
    "spark",
    "pipe",
    "moved",
    "moved_to_two",
)
"""On Apache's broker."""
OURS = ("ours",)
"""On our broker."""

"""The time, as records carry it."""

from datetime import UTC, datetime


def utc_now() -> str:
    """Now, ISO 8601 with seconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")

"""Progress bars on a flow run's page in Prefect: gates held of six, and how far the candidate's training is."""

import time
from contextlib import suppress
from typing import cast
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException

EVERY_S = 1.0  # a bar moves at most so often
UNREACHABLE = (httpx.HTTPError, PrefectException)


class ProgressBar:
    """A progress artifact of the run that makes it. A server that does not answer costs the bar, never the release."""

    def __init__(self, key: str, description: str) -> None:
        self._artifact_id: UUID | None = None
        self._moved_s = -EVERY_S
        with suppress(*UNREACHABLE):
            self._artifact_id = cast(
                UUID, create_progress_artifact(0.0, key=key, description=description)
            )  # not awaitable: no loop runs here

    def show(self, percent: float, description: str) -> None:
        """Move the bar to `percent` (0 to 100) and say where that is; left out when it moved a moment ago, unless it is the end."""
        if self._artifact_id is None or (percent < 100 and time.monotonic() - self._moved_s < EVERY_S):
            return
        self._moved_s = time.monotonic()
        try:
            update_progress_artifact(self._artifact_id, percent, description=description)
        except UNREACHABLE:
            self._artifact_id = None  # asking again would hold up the run at every step

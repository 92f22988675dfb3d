"""Progress bars on a flow run's page in Prefect: gates held of six, and how far the candidate's training is."""

import re
import time
from collections.abc import Callable
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
        with suppress(*UNREACHABLE):
            self._artifact_id = cast(
                UUID, create_progress_artifact(0.0, key=key, description=description)
            )  # not awaitable: no loop runs here

    def show(self, percent: float, description: str) -> None:
        """Move the bar to `percent` (0 to 100) and say where that is."""
        if self._artifact_id is None:
            return
        try:
            update_progress_artifact(self._artifact_id, percent, description=description)
        except UNREACHABLE:
            self._artifact_id = None  # asking again would hold up the run at every step


class Said:
    """Passes on what is said, and moves a bar to the percentage that it names."""

    def __init__(self, say: Callable[[str], None], bar: ProgressBar) -> None:
        self.say = say
        self.bar = bar
        self._moved_s = -EVERY_S

    def __call__(self, text: str) -> None:
        self.say(text)
        percent = re.search(r"\b(\d{1,3})%", text)
        if percent and time.monotonic() - self._moved_s >= EVERY_S:
            self._moved_s = time.monotonic()
            self.bar.show(float(percent[1]), text)

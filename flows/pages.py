"""What Prefect's pages show of a gate and of a release: tables, one plot a gate, the decision."""

import logging
import time
from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.progress import UNREACHABLE
from infra.markdown import artifact_key, gate_artifact_markdown, gate_gist, release_summary_markdown, table_rows
from infra.report import GateLine, ReleaseReport, headline

PATIENCE_S = 60.0  # a Prefect server restarts in 10-25 s
AGAIN_S = 2.0


def show_gate(line: GateLine) -> None:
    """A gate's checks as a table artifact, its reason and plot as a markdown artifact."""
    key, gist = artifact_key(line.verdict), gate_gist(line)
    _show(lambda: create_table_artifact(key=f"{key}-checks", table=table_rows(line.verdict), description=gist))
    _show(lambda: create_markdown_artifact(key=key, markdown=gate_artifact_markdown(line), description=gist))


def show_release(report: ReleaseReport, *, registry_page: str = "") -> None:
    """The decision, on the flow run's own page. Args: registry_page, the address of the candidate's; "" when it has none."""
    text = release_summary_markdown(report, registry_page)
    _show(lambda: create_markdown_artifact(key="release", markdown=text, description=headline(report)))


def _show(make: Callable[[], Any]) -> None:
    """Make an artifact; a server that does not answer for a minute costs the page, never the release: evidence is in the store."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            make()
            return
        except UNREACHABLE as error:
            if time.monotonic() > deadline:
                logging.getLogger("prefect.seatrial").warning(
                    "a page is missing on this run: the Prefect server does not answer (%s)", error
                )
                return
            time.sleep(AGAIN_S)

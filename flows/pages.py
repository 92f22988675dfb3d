"""What Prefect's pages show of a gate and of a release: tables, one plot a gate, the decision."""

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.markdown import artifact_key, gate_artifact_markdown, gate_gist, release_summary_markdown, table_rows
from infra.report import GateLine, ReleaseReport, headline


def show_gate(line: GateLine) -> None:
    """A gate's checks as a table artifact, its reason and plot as a markdown artifact."""
    key, gist = artifact_key(line.verdict), gate_gist(line)
    create_table_artifact(key=f"{key}-checks", table=table_rows(line.verdict), description=gist)
    create_markdown_artifact(key=key, markdown=gate_artifact_markdown(line), description=gist)


def show_release(report: ReleaseReport) -> None:
    """The decision, on the flow run's own page."""
    create_markdown_artifact(key="release", markdown=release_summary_markdown(report), description=headline(report))

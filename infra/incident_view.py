"""An incident for people: a row a rank, a picture of how far each came, and a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from infra.incidents import StoredIncident
from infra.markdown import paragraphs, safe
from infra.plots import plot_png
from infra.report import data_uri
from infra.wording import count, duration, stopped
from validation.flight import DEFAULT_GROUP, Dump, Evidence, RankEvidence
from validation.verdict import Plot, Series

SHOWN = 6  # ranks in the picture: the culprits, then the others by number
LINES = 12  # of evidence on the page
STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk", "T": "stopped", "Z": "dead", "X": "gone"}


def gist(stored: StoredIncident) -> str:
    """One line: what, who, and whether it was planned."""
    finding, record = stored.finding, stored.record
    who = ", ".join(map(str, finding.get("ranks", ())))
    rank = f" by rank {who}" if who else ""
    planned = f", planned ({record['planned']})" if record.get("planned") else ""
    return f"{finding['verdict']}: {finding['kind']}{rank} in attempt {record['attempt']}{planned}"


def rank_rows(stored: StoredIncident, evidence: Evidence) -> list[dict[str, str]]:
    """A row a rank: its part in it, where its program stood, its process, its last operation."""
    finding = stored.finding
    return [
        {"rank": str(rank), "part": _part(rank, finding), **_standing(known), "process": _process(known), **_last(known)}
        for rank, known in sorted(evidence.ranks.items())
    ]


def _part(rank: int, finding: Mapping[str, Any]) -> str:
    if rank in finding.get("ranks", ()):
        return "culprit"
    return "waits" if rank in finding.get("waiting", ()) else ""


def _newest(known: RankEvidence) -> Dump | None:
    return next(reversed((*known.late_dumps, *known.dumps)), None)


def _standing(known: RankEvidence) -> dict[str, str]:
    dump = _newest(known)
    marker = dump.marker if dump else None
    step, phase = (marker.step, marker.phase) if marker else (-1, "")
    return {"step": str(step) if step >= 0 else "", "phase": phase}


def _process(known: RankEvidence) -> str:
    if known.exit_code is not None:
        return f"killed by signal {-known.exit_code}" if known.exit_code < 0 else f"exit code {known.exit_code}"
    return STATES.get(known.state, known.state)


def _last(known: RankEvidence) -> dict[str, str]:
    dump = _newest(known)
    if dump is None or not len(dump.seq):
        return {"last operation": "none recorded", "called at": ""}
    open_ones = (~dump.finished).nonzero()[0]
    at = (
        int(open_ones[-1]) if len(open_ones) else len(dump.seq) - 1
    )  # what it is inside of says more than what a thread beside it did since
    signature, group = dump.signatures[dump.signature[at]], dump.groups[dump.group[at]]
    of = "" if group.name == DEFAULT_GROUP else f" of group {group.name}"
    place = dump.places[dump.place[at]] if dump.place is not None and len(dump.places) else ""
    return {"last operation": f"{signature.op} {dump.seq[at]}{of}{', not over' if len(open_ones) else ''}", "called at": place}


def progress_plot(stored: StoredIncident, evidence: Evidence) -> Plot:
    """How many operations each rank had begun, by time before the newest snapshot: a line that ends early or runs ahead is the story."""
    dumps = {rank: dump for rank, known in evidence.ranks.items() if (dump := _newest(known)) is not None and len(dump.seq)}
    culprits = [rank for rank in stored.finding.get("ranks", ()) if rank in dumps]
    shown = [*culprits, *(rank for rank in sorted(dumps) if rank not in culprits)][:SHOWN]
    end_ns = max((int(max(dump.created_ns[-1], dump.taken_ns)) for dump in dumps.values()), default=0)
    return Plot(
        title="Operations that each rank has begun", kind="line", x_label="time before the snapshot (s)", y_label="operations",
        series=tuple(_line(rank, dumps[rank], end_ns, is_culprit=rank in culprits) for rank in sorted(shown)),
    )  # fmt: skip


def _line(rank: int, dump: Dump, end_ns: int, *, is_culprit: bool) -> Series:
    """One rank's line, to the snapshot's moment; thinned out where there are many operations."""
    every = max(1, len(dump.seq) // 200)
    times = [(int(ns) - end_ns) / 1e9 for ns in dump.created_ns[::-1][::every][::-1]]
    counts = [float(number) for number in range(len(dump.seq), 0, -1)][::every][::-1]
    return Series(name=f"rank {rank}{' (culprit)' if is_culprit else ''}", x=(*times, 0.0), y=(*counts, float(len(dump.seq))))


def incident_markdown(stored: StoredIncident, evidence: Evidence, *, links: Sequence[str] = ()) -> str:
    """The incident's page. Args: links, markdown links to the run and to the files."""
    finding, record = stored.finding, stored.record
    lines = [str(line) for line in finding.get("evidence", ())]
    rest = [f"and {count(len(lines) - LINES)} more"] if len(lines) > LINES else []
    planned = f"**Planned:** {safe(record['planned'])}. Nothing has to be done about it." if record.get("planned") else ""
    return paragraphs(
        f"## {safe(gist(stored))}",
        safe(stopped(finding["explanation"])),
        planned,
        f"**Do next:** {safe(stopped(finding['action']))}" if not planned else "",
        f"**What was done:** {safe(stopped(record['mitigation']['text']))}",
        f"**Owner:** {safe(finding['owner'])}" if finding.get("owner") else "",
        f"Confidence: {safe(finding['confidence'])}. {_timing(record)}",
        "\n".join(f"- {safe(line)}" for line in [*lines[:LINES], *rest]),
        f"![operations by rank]({data_uri(plot_png(progress_plot(stored, evidence)))})" if evidence.ranks else "",
        "\n".join(f"- {safe(problem)}" for problem in evidence.problems),
        " · ".join(links),
    )


def _timing(record: Mapping[str, Any]) -> str:
    if not record.get("threshold_s"):
        return f"{record['world_size']} ranks."
    return (
        f"{record['world_size']} ranks stood still for {duration(record['stalled_s'])}; "
        f"the job's own threshold was {duration(record['threshold_s'])}."
    )

"""`seatrial diagnose`: a folder of evidence -> what, who, why, what to do. Needs neither Prefect, MLflow nor torch."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from flows.diagnosing_traces import trace_finding
from infra.dump_names import Found
from infra.dumps import Reading, read_folder, without_cut
from infra.traces import TraceFile, read_traces
from validation.canonical import plain
from validation.diagnose import diagnose
from validation.errors import DataError, ReleaseError
from validation.finding import Finding, document
from validation.flight import Evidence, RankEvidence

MOST_ROWS = 2_000_000  # of a timeline that is replayed; a larger one is only searched for stragglers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diagnosis:
    """What was found, and in what."""

    finding: Finding
    evidence: Evidence
    problems: tuple[str, ...]  # what could not be read or trusted

    def document(self) -> dict[str, Any]:
        """The document of `seatrial diagnose --json`: the finding's, and `problems`."""
        made: dict[str, Any] = plain({**document(self.finding), "problems": list(self.problems)})
        return made


def diagnose_folder(folder: Path) -> Diagnosis:
    """Read all that a folder says of one job and judge it.

    Args: folder, as docs/diagnose.md describes: dumps and stacks, an incident's or a run's folder, a timeline, or traces.
    Raises: DataError when nothing in it can be read, or it holds several jobs.
    """
    folder = Path(folder)
    reading = read_folder(folder)
    problems = list(reading.evidence.problems)
    evidence = _with_rings(reading, problems)
    traces, unread = read_traces([item.path for item in reading.found if item.kind == "trace"])
    problems += unread
    if not (evidence.ranks or evidence.timeline is not None or traces):
        raise DataError(
            f"{folder} holds nothing that can be diagnosed: {'; '.join(problems) or 'no dumps, timeline or traces'}. Give a folder "
            "with the ranks' dumps; docs/diagnose.md names all that is read."
        )
    evidence = replace(evidence, problems=tuple(dict.fromkeys(problems)))
    finding = judge(replace(reading, evidence=evidence)) if evidence.ranks or evidence.timeline is not None else None
    if traces:
        finding = _with_traces(finding, traces, problems)
    elif finding is not None:
        finding = with_figures(finding, evidence)
    assert finding is not None
    return Diagnosis(finding=finding, evidence=evidence, problems=tuple(dict.fromkeys(problems)))


def judge(reading: Reading) -> Finding:
    """Diagnose; a rank is never blamed for being behind in a file that was cut off, nor is a job called well for it."""
    finding = diagnose(reading.evidence)
    is_unsure = reading.cut and (finding.kind == "healthy" or reading.cut.intersection(finding.ranks))
    return diagnose(without_cut(reading)) if is_unsure else finding


def _with_rings(reading: Reading, problems: list[str]) -> Evidence:
    """The evidence with the rings of a run's newest attempt, for ranks of which there is no dump, and with its timeline."""
    rings = _newest_attempt([item for item in reading.found if item.kind == "ring"])
    evidence = reading.evidence
    if not rings:
        return evidence
    from trainer.ring import read_ring

    ranks = dict(evidence.ranks)
    for item in rings:
        try:
            dump = read_ring(item.path)
        except (OSError, ValueError, ReleaseError) as error:
            problems.append(f"{item.path.name} cannot be read ({error})")
            continue
        known = ranks.get(dump.rank, RankEvidence(rank=dump.rank))
        if not (known.dumps or known.late_dumps):
            ranks[dump.rank] = replace(known, dumps=(dump,))
    timeline = evidence.timeline if evidence.timeline is not None else _recorded_timeline(rings, problems)
    return replace(evidence, ranks=dict(sorted(ranks.items())), world_size=evidence.world_size or len(rings), timeline=timeline)


def _recorded_timeline(rings: Sequence[Found], problems: list[str]) -> pd.DataFrame | None:
    """The steps that the rings still hold; None where they hold none."""
    from trainer.recorded_timeline import recorded_timeline

    try:
        table = recorded_timeline(item.path for item in rings)
    except (OSError, ValueError, ReleaseError) as error:
        problems.append(f"the rings give no timeline ({error})")
        return None
    return None if table.empty else table


def _newest_attempt(rings: Sequence[Found]) -> list[Found]:
    """Of files "attempt-A-rank-R.ring" those with the highest A."""
    attempts = {
        item.path: int("0" + item.path.name.partition("-rank")[0].rpartition("-")[2]) for item in rings if "-rank" in item.path.name
    }
    newest = max(attempts.values(), default=0)
    return [item for item in rings if attempts.get(item.path, newest) == newest]


def with_figures(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with the figures of a replay of the timeline, where there is one that can be replayed."""
    table = evidence.timeline
    if table is None or finding.what_if or len(table) > MOST_ROWS:
        return finding
    from validation.what_if import what_if

    with contextlib.suppress(DataError):  # e.g. no step that all ranks ended: the finding does not hang on it
        return replace(finding, what_if=what_if(table).document())
    return finding


def _with_traces(finding: Finding | None, traces: Sequence[TraceFile], problems: list[str]) -> Finding | None:
    """The figures of every trace under `what_if`: of a lone one its own, of several by name; the slowest job is the finding."""
    found = []
    for trace in traces:
        try:
            found.append((trace.name, trace_finding(trace)))
        except DataError as error:
            problems.append(str(error))
    if not found:
        if finding is None:
            raise DataError(f"no trace could be replayed: {'; '.join(problems)}. Give traces as docs/diagnose.md describes.")
        return finding
    slowest_name, slowest = max(found, key=lambda item: item[1].slowdown)
    figures: Mapping[str, Any] = found[0][1].what_if if len(found) == 1 else {name: one.what_if for name, one in found}
    if finding is None:
        lines = [line for name, one in found for line in (f"{name}: {one.explanation}", *(one.evidence if len(found) == 1 else ()))]
        text = slowest.explanation if len(found) == 1 else f"{slowest_name}: {slowest.explanation}"
        return replace(slowest, what_if=figures, evidence=tuple(lines), explanation=text)
    return replace(finding, what_if=figures)

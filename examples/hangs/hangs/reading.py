"""What a played case left, as evidence; and the same with parts missing, in another order, or with full rings. Torch-free."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from infra.dumps import read_evidence
from trainer.recorded_timeline import recorded_timeline
from validation.flight import Dump, Evidence, RankEvidence

EVIDENCE, PLAIN = "evidence", "plain"  # folders of a played case
KEPT = 4  # operations that a full ring still holds


def ring_of(root: Path, rank: int) -> Path:
    """A rank's ring file."""
    return root / "flight" / f"attempt-0-rank-{rank}.ring"


def result_of(root: Path, rank: int) -> Path:
    """Where a rank says how its program ended."""
    return root / EVIDENCE / f"rank{rank}.result.txt"


def evidence_of(root: Path, world_size: int, *, part: str = EVIDENCE) -> Evidence:
    """All that a case left, read back. Args: part, PLAIN for torch's own recorder alone, without our rings and marks."""
    found = replace(read_evidence(root / part), world_size=world_size)
    rings = [ring for rank in range(world_size) if (ring := ring_of(root, rank)).exists()]
    if part == PLAIN or len(rings) < world_size:
        return found
    timeline = recorded_timeline(rings)
    return replace(found, timeline=timeline if len(timeline) else None)


def without(evidence: Evidence, rank: int) -> Evidence:
    """The same when a rank left neither dumps nor stacks nor times."""
    lost = replace(evidence.ranks[rank], dumps=(), late_dumps=(), stacks=())
    timeline = evidence.timeline
    return replace(
        evidence, ranks={**evidence.ranks, rank: lost}, timeline=None if timeline is None else timeline[timeline["rank"] != rank]
    )  # fmt: skip


def shuffled(evidence: Evidence, seed: int) -> Evidence:
    """The same, read in another order of ranks and rows."""
    order = list(evidence.ranks)
    random.Random(seed).shuffle(order)
    timeline = evidence.timeline
    return replace(
        evidence, ranks={rank: evidence.ranks[rank] for rank in order},
        timeline=None if timeline is None else timeline.sample(frac=1.0, random_state=seed),
    )  # fmt: skip


def wrapped(evidence: Evidence, kept: int = KEPT) -> Evidence:
    """The same when every ring holds no more than so many operations: older ones are gone."""
    ranks: Mapping[int, RankEvidence] = {
        rank: replace(known, dumps=tuple(_newest(dump, kept) for dump in known.dumps)) for rank, known in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def _newest(dump: Dump, kept: int) -> Dump:
    if len(dump.seq) <= kept:
        return dump
    columns = {name: getattr(dump, name) for name in ("group", "seq", "signature", "created_ns", "finished", "step", "micro", "place")}
    return replace(dump, wrapped=True, **{name: None if column is None else column[-kept:] for name, column in columns.items()})

"""What a diagnosis says of a job: who, what, why, what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["hang", "straggler", "crash", "healthy", "inconclusive"]
FindingKind = Literal[
    "missing_participant", "extra_collective", "uneven_inputs", "op_type_mismatch", "shape_mismatch", "dtype_mismatch", "root_mismatch",
"order_swap_same_group", "order_swap_cross_group", "group_membership_mismatch", "p2p_mismatch", "p2p_cycle",
    "exception_path", "teardown_deadlock", "dead_process", "frozen_process", "dataloader_deadlock", "late_rank", "all_ranks_same_op",
    "uniform_slowness", "silent_mismatch", "insufficient_evidence", "healthy",
]  # fmt: skip
FINDING_KINDS: tuple[str, ...] = get_args(FindingKind)
CAUSES = ("data", "compute", "host_cpu", "gc", "checkpoint_io", "compile", "imbalance", "network")  # of late_rank
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A place in the order of a group's operations; -1 and "" = not known."""

    op: str = ""
    seq: int = -1
    group: str = ""
    where: str = ""  # call site


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosis. `ranks` are culprits only: never those that wait for them, nor those that a backend aborted."""

    verdict: Verdict
    kind: FindingKind
    ranks: tuple[int, ...] = ()  # () = nobody, or it cannot be told who
    cause: str = ""  # one of CAUSES, for late_rank
    group: tuple[str, ...] = ()  # names; several for a cycle across groups
    collective: Operation = field(default_factory=Operation)  # where a rank really left the common order
    first_visible: Operation = field(default_factory=Operation)  # where it first shows in the recorded operations
    step: int = -1
    phase: str = ""
    slowdown: float = 0.0  # for stragglers: time of a step over its time without the culprit; 0 = not measured
    lateness_s: float = 0.0
    waiting: tuple[int, ...] = ()  # victims
    explanation: str  # one or two sentences
    action: str  # what to do next
    evidence: tuple[str, ...] = ()  # lines that show it
    confidence: Confidence = "high"
    what_if: Mapping[str, Any] = field(default_factory=dict)  # figures of a replay, see validation/what_if.py


OWNER = "the recipe's owner"  # who answers for a recipe's failures until its card names somebody


def document(finding: Finding, *, owner: str = OWNER) -> dict[str, Any]:
    """The finding as `seatrial diagnose --json` prints it: plain values, None = not known; `group` is a list where there are several."""
    group: str | list[str] | None = list(finding.group) if len(finding.group) > 1 else (finding.group or (None,))[0]
    return {
        "verdict": finding.verdict, "kind": finding.kind, "ranks": list(finding.ranks), "group": group,
        "collective": _place(finding.collective), "first_visible": _place(finding.first_visible), "step": _known(finding.step),
        "phase": finding.phase, "cause": finding.cause, "slowdown": finding.slowdown, "lateness_s": round(finding.lateness_s, 6),
        "waiting": list(finding.waiting), "explanation": finding.explanation, "action": finding.action, "owner": owner,
        "confidence": finding.confidence, "evidence": list(finding.evidence), "what_if": dict(finding.what_if),
    }  # fmt: skip


def _place(place: Operation) -> dict[str, Any]:
    return {"op": place.op or None, "seq": _known(place.seq), "group": place.group or None, "where": place.where or None}


def _known(number: int) -> int | None:
    return None if number < 0 else number

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

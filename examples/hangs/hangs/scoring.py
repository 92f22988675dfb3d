"""Whether a finding is right about a case: kind, culprits and place; for late ranks phase and cause. Pure."""

from dataclasses import dataclass

from hangs.catalogue import ALARMS, Case
from validation.finding import Finding

WRONG_BLAME = 2  # counts as so many mistakes: somebody drains a good host
P2P_KINDS = ("p2p_mismatch", "p2p_cycle")  # what shows first of these, to recorders that know no sends, is a collective that waits
SAME_OPS = {
    "reduce_scatter_tensor": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter", "all_gather_into_tensor": "all_gather",
    "_allgather_base": "all_gather", "all_to_all_single": "all_to_all", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "allgather": "all_gather", "allreduce": "all_reduce",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One finding against one case."""

    kind: bool
    ranks: bool
    place: bool  # group, operation and number of what is first visible; of late ranks phase and cause
    text: bool  # an exception's words are passed on
    blamed: tuple[int, ...]  # ranks that were named and have no part in it

    @property
    def is_right(self) -> bool:
        """Everything is."""
        return self.kind and self.ranks and self.place and self.text

    @property
    def mistakes(self) -> int:
        """0 when it is right; blaming somebody who waits, or was aborted, counts double."""
        return 0 if self.is_right else WRONG_BLAME if self.blamed else 1


def score(case: Case, finding: Finding) -> Score:
    """Compare. A control is right when there is no alarm; where there is nothing to see, only when that is said."""
    culprits = {rank for ranks in case.ranks for rank in ranks}
    blamed = tuple(rank for rank in finding.ranks if rank not in culprits)
    if case.is_control:
        quiet = finding.verdict not in ALARMS and finding.kind in (case.kind, "insufficient_evidence")
        return Score(kind=quiet, ranks=not finding.ranks, place=True, text=True, blamed=finding.ranks)
    return Score(
        kind=finding.kind in case.kinds,
        ranks=tuple(sorted(finding.ranks)) in case.ranks,
        place=_in_place(case, finding),
        text=case.text in " ".join((finding.explanation, finding.action, *finding.evidence)),
        blamed=blamed,
    )


def _in_place(case: Case, finding: Finding) -> bool:
    is_late = not case.cause or finding.cause == case.cause
    in_phase = not case.phases or finding.phase in case.phases
    in_group = not case.groups or set(finding.group) == set(case.groups)
    said = [finding.first_visible.op, *([finding.collective.op] if case.kind in P2P_KINDS else [])]
    at_op = not case.ops or any(SAME_OPS.get(op, op) in case.ops for op in said)
    return is_late and in_phase and in_group and at_op and case.seq in (0, finding.first_visible.seq)

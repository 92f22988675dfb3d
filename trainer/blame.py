"""What is done about a finding: which ranks count as blamed, which places are left out, and the words for it. Pure.

A place is where a rank of the call's first attempt sat: on a machine with several GPUs, its device. Ranks are numbered anew in each
attempt, places are not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config import Parallel
from validation.finding import Finding

Action = Literal["restart", "leave_out", "stop", "wait"]
SURE = ("high", "medium")  # confidence that is acted on
BLAMED = 2  # incidents after which a place is left out: one may be bad luck
# Ranks that left the common order can never come back into it, whatever they do next: waiting longer shows nothing more. Of the other kinds
# a slow rank looks the same for a while, so they have to stand at a second look, after twice the threshold.
AT_ONCE = frozenset({
    "extra_collective", "uneven_inputs", "op_type_mismatch", "shape_mismatch", "dtype_mismatch", "root_mismatch",
    "order_swap_same_group", "order_swap_cross_group", "group_membership_mismatch", "p2p_mismatch", "p2p_cycle", "exception_path",
    "teardown_deadlock", "dead_process", "frozen_process",
})  # fmt: skip
# An exception is the program's and comes again on whatever rank has the same samples, unless it speaks of the machine.
MACHINE_WORDS = ("CUDA error", "uncorrectable", "ECC", "NCCL error", "Bus error", "Input/output error", "No space left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mitigation:
    """What is done about an incident."""

    action: Action
    text: str
    left_out: tuple[int, ...] = ()  # ranks of the incident's attempt


def is_definite(finding: Finding, *, looks: int) -> bool:
    """Whether an attempt is ended because of a finding. Args: looks, how often it was found since the last progress."""
    return finding.verdict == "hang" and finding.confidence in SURE and (finding.kind in AT_ONCE or looks > 1)


def blamed(finding: Finding) -> tuple[int, ...]:
    """The ranks that a finding speaks against: one, since several share a cause that no place has."""
    if finding.verdict not in ("hang", "crash") or finding.confidence not in SURE or len(finding.ranks) != 1:
        return ()
    if finding.kind in ("exception_path", "teardown_deadlock"):
        return finding.ranks if any(word in " ".join(finding.evidence) for word in MACHINE_WORDS) else ()
    return finding.ranks


class Places:
    """Where the ranks of one call sit, and which places are left out. One always stays."""

    def __init__(self, first: int, blames: Mapping[int, int | None] | None = None) -> None:
        """Args: first, ranks of the call's first attempt; blames, place by incident, of a leader before."""
        self._first = first
        self._blames: dict[int, int] = {}
        self.left_out: tuple[int, ...] = ()
        for incident, place in (blames or {}).items():
            self.blame(incident, place)

    def seats(self, world_size: int, parallel: Parallel) -> tuple[int, ...]:
        """Place by rank of an attempt that was planned on so many ranks: fewer when places are missing.

        Sharded ranks come in powers of two, as the order of the exact reduction wants them.
        """
        free = [place for place in range(max(world_size, self._first)) if place not in self.left_out][:world_size]
        if parallel == "fsdp2" and len(free) < world_size:
            free = free[: 1 << (len(free).bit_length() - 1)]
        return tuple(free)

    def blame(self, incident: int, place: int | None) -> None:
        """Blame a place for an incident; said again, the last word counts. None: nobody."""
        self._blames.pop(incident, None)
        if place is not None:
            self._blames[incident] = place
        often = sorted(place for place, count in Counter(self._blames.values()).items() if count >= BLAMED)
        self.left_out = tuple(often[: max(self._first - 1, 0)])


def mitigation(*, is_last: bool, left_out: Sequence[int], world_size: int, next_size: int) -> Mitigation:
    """What an attempt's end leads to. Args: is_last, no attempt follows; left_out, ranks that the next one, of next_size, goes without."""
    if is_last:
        return Mitigation(action="stop", text="no further attempt was allowed, so the run was ended")
    if left_out:
        return Mitigation(
            action="leave_out", left_out=tuple(left_out),
            text=f"{in_words(left_out)} left out after {BLAMED} incidents: restarted on {next_size} of {world_size} ranks from the last "
            "sealed checkpoint, with the same lanes and so the same bits",
        )  # fmt: skip
    return Mitigation(action="restart", text=f"restarted on {next_size} rank{'s' * (next_size != 1)} from the last sealed checkpoint")


def waits(*, ended: bool = False) -> Mitigation:
    """What is done about a stall that nobody has to end. Args: ended, it did by itself."""
    going_on = "the job goes on until it moves again, its collectives time out or its deadline passes"
    return Mitigation(action="wait", text="the ranks moved again by themselves; nothing was ended" if ended else going_on)


def hang_text(finding: Finding) -> str:
    """A hang in a few words: "hang: missing_participant, rank 2, at all_reduce 7 of group 0 in step 3 (loop.py:88 train_step)"."""
    at = finding.collective
    parts = [f"hang: {finding.kind}", in_words(finding.ranks)]
    if at.op:
        parts.append(f"at {at.op} {at.seq if at.seq >= 0 else ''}".rstrip() + (f" of group {at.group}" if at.group else ""))
    if finding.step >= 0:
        parts.append(f"in step {finding.step}")
    if at.where:
        parts.append(f"({at.where})")
    return ", ".join(parts[:2]) + "".join(f" {part}" if part.startswith(("in", "(")) else f", {part}" for part in parts[2:])


def in_words(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0, 1, 3", "no single rank"."""
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else "no single rank"

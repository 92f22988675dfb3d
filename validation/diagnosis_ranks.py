"""Sort the first bits that differ between ranks, or between world sizes, into a kind."""

from dataclasses import dataclass

from validation.completeness import listed
from validation.diagnosis import GRADIENTS, STAGE_WORDS
from validation.diagnosis_kinds import Diagnosis, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class BitDifference:
    """The first step and stage in which digests differ, at the smallest world size where they do."""

    world_size: int
    step: int
    stage: str  # of records.STAGES
    tensors: tuple[str, ...]  # that differ there
    total: int  # tensors of this stage there
    ranks: tuple[int, ...]  # that hold other bits than most, or than world size 1
    is_between_ranks: bool  # ranks of one world size disagree; else they agree, and not with other world sizes
    agreeing: tuple[str, ...]  # earlier stages of this step, measured and equal
    absent: tuple[str, ...] = ()  # of `tensors`: some rank has no gradient of it in this step while others have

    @property
    def is_most(self) -> bool:
        """Whether more than half of the tensors differ."""
        return 2 * len(self.tensors) > self.total


def diagnose_ranks(difference: BitDifference) -> Diagnosis:
    """Name the kind of a first difference in bits."""
    stage, between = difference.stage, difference.is_between_ranks
    if stage == "buffer":
        whom = "ranks hold other buffers" if between else "buffers depend on how many ranks there are"
        return _said("buffers", difference, f"{whom} where gradients and weights agree")
    if not between:
        return _said("world_size", difference, "all ranks of a world size agree, but the result depends on how many there are")
    if stage == "clipped" and "reduced" in difference.agreeing:
        return _said(
            "clipping",
            difference,
            "ranks agree before clipping and not after it: each clips by its own norm, only some clip, or each adds its own (noise, say)",
        )
    if stage in GRADIENTS:
        return _gradients(difference)
    if difference.absent:
        return _said("unreduced_tensors", difference, f"some ranks have no gradient of {listed(difference.absent)} and others have")
    if difference.step == 0:
        words = "ranks were handed the same gradients, and have other weights after the first update: they started from other weights"
        return _said("initial_weights", difference, words)
    return _said(
        "update", difference, "ranks were handed the same gradients and changed their weights differently, or only some made the step"
    )


def _gradients(difference: BitDifference) -> Diagnosis:
    since = "" if difference.step == 0 else f", and did agree before step {difference.step}"
    if difference.is_most:
        what = "every rank keeps its own gradient: nothing is reduced, or at the wrong micro-batch"
        return _said("no_reduction", difference, f"{what}{since}")
    return _said("unreduced_tensors", difference, f"ranks agree but for these tensors: they take no part in the reduction{since}")


def _said(kind: Kind, difference: BitDifference, words: str) -> Diagnosis:
    count = len(difference.tensors)
    which = "every tensor" if count == difference.total else f"{count} of {difference.total} tensors: {listed(difference.tensors)}"
    return Diagnosis(kind=kind, words=f"{words} ({STAGE_WORDS.get(difference.stage, difference.stage)}; {which})")

"""Ranks that found each other at different steps: the error that says so is an echo, and the steps of all ranks tell who left the order."""

import re
from collections import Counter
from collections.abc import Mapping

from validation.finding import Confidence, Finding, FindingKind, Operation
from validation.hang_reasons import exception_of, marker_of
from validation.hang_scene import Scene
from validation.hang_texts import says_out_of_step
from validation.hang_words import found, listed, operation, sentence, verb

_STEPS = re.compile(r"the ranks' steps are \[([\d, ]+)\]")


def judge_out_of_step(scene: Scene) -> Finding | None:
    """Name the ranks that are ahead (they left out a collective) or alone behind (they made one more); None when nobody said so.

    Of two ranks the one ahead is named: by its own count it has begun a step whose predecessor the other is still adding.
    """
    told = {rank: text for rank in scene.ranks if (text := _said(scene, rank))}
    if not told:
        return None
    steps = _steps_told(told, len(scene.ranks)) or _steps_recorded(scene)
    lines = tuple(f"rank {rank}: at step {step} in the reduction that was refused" for rank, step in sorted(steps.items()))[:8]
    who, common = _apart(steps)
    if not who:
        return _nobody(scene, told, lines)
    is_ahead = steps[who[0]] > common
    kind, exception = _kind(scene, who, is_ahead=is_ahead)
    did = f"{verb(who, 'was', 'were')} at step {steps[who[0]]} where the others were at step {common}"
    why = f"after {exception}, " if exception else ""
    place = _left_at(scene, who[0], common) if is_ahead else None
    left = "left out what the others reduced there" if is_ahead else "made one reduction more than the others"
    return found(
        scene, kind, ranks=who, step=common if is_ahead else steps[who[0]], collective=place, verdict="hang",
        explanation=f"{sentence(listed(who))} {did}: {why}{verb(who, 'it', 'they')} {left}. {sentence(listed(told))} only noticed.",
        lines=(*lines, f"{listed(told)}: raised that the ranks are out of step, an echo"), confidence=_confidence(steps, who),
    )  # fmt: skip


def _said(scene: Scene, rank: int) -> str:
    """What the rank said of steps that differ, as its last word or in its note; "" = nothing."""
    marker = marker_of(scene, rank)
    texts = (scene.of(rank).result, marker.note if marker is not None else "")
    return next((text for text in texts if says_out_of_step(text)), "")


def _steps_told(told: Mapping[int, str], world_size: int) -> dict[int, int]:
    """Steps by rank, as the error lists them; {} = it does not."""
    for _, text in sorted(told.items()):
        match = _STEPS.search(text)
        if match:
            steps = [int(part) for part in match[1].split(",")]
            if len(steps) == world_size:
                return dict(enumerate(steps))
    return {}


def _steps_recorded(scene: Scene) -> dict[int, int]:
    """Steps by rank under the last number of the group of all that every rank came to; {} = not recorded of every rank."""
    lane = scene.default
    if lane is None or len(lane.tracks) < len(scene.ranks):
        return {}
    seq = min(track.last for track in lane.tracks.values())
    steps = {rank: track.value("step", seq) for rank, track in lane.tracks.items()}
    return steps if min(steps.values()) >= 0 else {}


def _apart(steps: Mapping[int, int]) -> tuple[tuple[int, ...], int]:
    """Ranks that are at another step than most, and the step of most; of two ranks the one ahead. () = it cannot be told."""
    counts = Counter(steps.values()).most_common()
    if len(counts) != 2:
        return (), -1
    (common, many), (other, few) = counts
    if many == few:
        if len(steps) > 2:
            return (), -1
        common, other = sorted((common, other))
    return tuple(sorted(rank for rank, step in steps.items() if step == other)), common


def _kind(scene: Scene, who: tuple[int, ...], *, is_ahead: bool) -> tuple[FindingKind, str]:
    """How they came to be there, and the exception that did it."""
    exception = exception_of(scene, who[0])
    if exception:
        return "exception_path", exception
    return ("missing_participant" if is_ahead else "extra_collective"), ""


def _confidence(steps: Mapping[int, int], who: tuple[int, ...]) -> Confidence:
    return "high" if 2 * (len(steps) - len(who)) > len(steps) else "medium"


def _left_at(scene: Scene, culprit: int, step: int) -> Operation | None:
    """The first operation of that step which the others made and the culprit did not; None = not recorded."""
    lane = scene.default
    if lane is None or culprit not in lane.tracks:
        return None
    mine = lane.tracks[culprit]
    for peer, track in sorted(lane.tracks.items()):
        column = track.column("step")
        if peer == culprit or column is None:
            continue
        seqs = [int(seq) for seq, at_step in zip(track.seq.tolist(), column.tolist(), strict=True) if at_step == step]
        left = next((seq for seq in seqs if mine.position(seq) < 0 or mine.value("step", seq) != step), None)
        if left is not None:
            return operation(scene, lane, left, peer, scene.keys[int(track.key[track.position(left)])])
    return None


def _nobody(scene: Scene, told: Mapping[int, str], lines: tuple[str, ...]) -> Finding:
    """As many on each side, or no steps: that they differ is all that is known."""
    return found(
        scene, "insufficient_evidence", verdict="inconclusive", confidence="low", lines=lines,
        explanation=f"{sentence(listed(told))} found the ranks out of step; which of them left a collective out was not recorded.",
    )  # fmt: skip

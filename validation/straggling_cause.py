"""Why a rank is late: in which phase it loses its time, and what kind of trouble that is."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from validation.straggling_lateness import Lateness
from validation.straggling_patterns import Late, Places
from validation.straggling_table import AFTER, BEFORE

CAUSE_OF = {
    "data": "data", "forward": "compute", "backward": "compute", "optimizer": "compute", "checkpoint": "checkpoint_io",
    "transfer": "network", "between": "host_cpu",
}  # fmt: skip
HOST_PHASES = ("data", "forward", "backward", "optimizer")  # a slow processor is slow in all of them, a slow device not in its input
ALIKE = 0.5  # of the largest phase's slowdown that the others have to share to be slow alike
PHASE_SHARE = 0.02  # of a step: phases shorter than that are not looked at
SLOW_SHARE = 0.10  # more than the others' time that a phase, or samples, have to be
PACE_SHARE = 0.08  # from the others' time a sample that still is the same pace
EXPLAINED_SHARE = 0.5  # of the lateness that a phase has to explain, or it hides in the one with the collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Where a rank's lateness comes from; times are means over its late steps, ms."""

    phase: str  # of Marker.phases; "" = between steps, or in no phase in particular
    cause: str
    phases_ms: Mapping[str, float]  # more than the others' median, by phase
    evidence: str
    is_hidden: bool = False  # the walls of the phase are the same on all ranks


def reason(late: Lateness, one: Late) -> Reason:
    """Explain a late rank by its phases, against the median of the other ranks in the same steps."""
    pieces = _pieces(late, one)
    lateness = float(late.excess[one.steps, one.place].mean())
    explained = sum(max(0.0, ms) for ms in pieces.values())
    phase = max(pieces, key=lambda name: pieces[name])
    if explained < EXPLAINED_SHARE * lateness:
        text = f"arrives {lateness:.4g} ms late although its phases take what the others' take: the others wait inside backward"
        return Reason(phase="backward", cause="compute", phases_ms=pieces, evidence=text, is_hidden=True)
    shown = ", ".join(f"{name} {pieces[name]:+.4g} ms" for name in sorted(pieces, key=lambda name: -pieces[name]) if _shows(pieces, name))
    cause, text = _cause(late, one, phase)
    return Reason(
        phase="collective" if phase == "transfer" else "" if phase == "between" else phase, cause=cause, phases_ms=pieces,
        evidence=f"against the median of the others: {shown}{text}",
    )  # fmt: skip


def _shows(pieces: Mapping[str, float], name: str) -> bool:
    return pieces[name] > 0.1 * max(pieces.values())


def _pieces(late: Lateness, one: Late) -> dict[str, float]:
    """Phase -> mean ms more than the others' median: of the step itself, and of the end of the step before.

    What comes last in a step makes late for the next one, or for an operation that ends this one, a barrier after a checkpoint.
    """
    table = late.table
    before = one.steps[(one.steps > 0)] - 1
    before = before[table.steps[before + 1] - table.steps[before] == 1]

    def more(phase: str, steps: Places) -> float:
        own = table.own[phase][steps]
        others = np.delete(own, one.place, axis=1)
        return float((own[:, one.place] - np.median(others, axis=1)).sum()) / len(one.steps) if len(steps) else 0.0

    pieces = {phase: more(phase, one.steps) for phase in BEFORE}
    return {**pieces, **{phase: max(more(phase, before), more(phase, one.steps)) for phase in AFTER}}


def _cause(late: Lateness, one: Late, phase: str) -> tuple[str, str]:
    """One of CAUSES, and what else speaks for it."""
    if phase in HOST_PHASES:
        if text := _more_samples(late, one):
            return "imbalance", text
        if text := _slow_alike(late, one):
            return "host_cpu", text
    return CAUSE_OF[phase], ""


def _ratio(late: Lateness, one: Late, phase: str) -> float:
    """This rank's time in a phase over the others' median; NaN for a phase that takes no time."""
    own = late.table.own[phase][one.steps]
    others = float(np.median(np.delete(own, one.place, axis=1)))
    if others < PHASE_SHARE * float(np.median(late.healthy_ms[one.steps])):
        return float("nan")
    return float(np.median(own[:, one.place])) / others


def _more_samples(late: Lateness, one: Late) -> str:
    """Says so when the rank has more samples and needs no more time for each."""
    samples = late.table.samples[one.steps]
    others = float(np.median(np.delete(samples, one.place, axis=1)))
    more = float(samples[:, one.place].mean()) / others if others > 0 else 1.0
    if more < 1 + SLOW_SHARE:
        return ""
    busy = sum(late.table.own[phase][one.steps] for phase in ("forward", "backward"))
    assert not isinstance(busy, int)
    other = float(np.median(np.delete(busy, one.place, axis=1)))
    pace = float(busy[:, one.place].mean()) / other if other > 0 else float("nan")
    if not pace <= more * (1 + PACE_SHARE):
        return ""
    return f"; it has {more:.2f} times the samples and computes {pace:.2f} times as long"


def _slow_alike(late: Lateness, one: Late) -> str:
    """Says so when input, forward and backward are slow by about the same factor."""
    ratios = {phase: _ratio(late, one, phase) for phase in HOST_PHASES}
    known = {phase: ratio for phase, ratio in ratios.items() if not np.isnan(ratio)}
    largest = max(known.values(), default=1.0)
    if "data" not in known or len(known) < 3 or largest < 1 + SLOW_SHARE / 2:
        return ""
    if min(known.values()) < 1 + ALIKE * (largest - 1):
        return ""
    return "; all its phases are slow alike: " + ", ".join(f"{phase} {ratio:.2f} times" for phase, ratio in known.items())


def steps_text(late: Lateness, steps: Places) -> str:
    """Steps of the table in words, by their own numbers."""
    numbers = late.table.steps[steps]
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"steps {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} steps ({', '.join(map(str, numbers[:6]))}{' ...' if len(numbers) > 6 else ''})"

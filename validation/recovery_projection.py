"""A measured recovery carried over to more ranks: arithmetic on stated assumptions, no measurement."""

import math
from dataclasses import dataclass

from validation.errors import EvidenceError
from validation.records import Recovery

SEGMENTS = ("detect_s", "teardown_s", "import_s", "rendezvous_s", "load_s", "first_step_s")
PROJECTED_GPUS = 8  # the service objective names eight


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A measured recovery carried over to more ranks; what it assumes stands in `project_recovery`."""

    ranks: int
    total_s: float  # death -> next optimizer update
    headroom_s: float  # left of the budget for what was not measured: a new node, CUDA and NCCL start-up
    load_mib_s: float  # checkpoint bytes / 2**20 loaded a second, every rank at once
    state_mib_in_budget: float  # largest checkpoint that could be loaded in time at that rate


def project_recovery(recovery: Recovery, *, state_mib: float, budget_s: float, ranks: int = PROJECTED_GPUS) -> Projection:
    """Carry a measured recovery over to `ranks` ranks of one warm node.

    Assumes that teardown, import and rendezvous grow in proportion to ranks and never shrink, that detection and the first step stay as
    measured, and that every rank loads the whole checkpoint at the measured rate. Raises EvidenceError for times or sizes that are not
    finite, negative, or for no ranks.
    """
    if math.isnan(measured_s(recovery)) or not (math.isfinite(state_mib) and state_mib >= 0) or min(ranks, recovery.resumed_world_size) < 1:
        raise EvidenceError(f"{recovery} with a state of {state_mib} MiB cannot be projected. Run the kill again on a sound clock.")
    growth = max(1.0, ranks / recovery.resumed_world_size)
    others_s = recovery.detect_s + growth * (recovery.teardown_s + recovery.import_s + recovery.rendezvous_s) + recovery.first_step_s
    total_s = others_s + recovery.load_s
    rate = state_mib / recovery.load_s if recovery.load_s else math.inf
    within = max(0.0, budget_s - others_s) * rate if math.isfinite(rate) else math.inf
    return Projection(
        ranks=ranks, total_s=total_s, headroom_s=budget_s - total_s, load_mib_s=rate, state_mib_in_budget=within
    )  # fmt: skip


def projection_lines(recovery: Recovery, state_mib: float, budget_s: float) -> list[str]:
    """The projection to PROJECTED_GPUS in words, with every assumption it rests on, one a line.

    Args: state_mib, one checkpoint in 2**20 bytes. Raises: EvidenceError as `project_recovery`.
    """
    seen = project_recovery(recovery, state_mib=state_mib, budget_s=budget_s)
    size = size_in_words(seen.state_mib_in_budget) if math.isfinite(seen.state_mib_in_budget) else "any size"
    growth = max(1.0, seen.ranks / recovery.resumed_world_size)
    grown = f"{recovery.teardown_s:.2f}, {recovery.import_s:.2f} and {recovery.rendezvous_s:.2f} s, times {growth:g}"
    a_second = f"{size_in_words(seen.load_mib_s)}/s" if math.isfinite(seen.load_mib_s) else "no time at all"
    rate = f"{a_second} ({size_in_words(state_mib)} in {recovery.load_s:.3g} s)"
    return [
        f"Projected to {seen.ranks} GPUs of one warm node: {seen.total_s:.2f} s of {budget_s:g} s, from a recovery of "
        f"{recovery.total_s:.2f} s on {recovery.resumed_world_size} ranks; {seen.headroom_s:.0f} s are left.",
        f"Assumed: tear down, import and rendezvous take time in proportion to ranks and never less than measured ({grown}).",
        f"Assumed: detection ({recovery.detect_s:.2f} s) and the first step ({recovery.first_step_s:.2f} s) stay as measured.",
        f"Assumed: every rank loads and verifies the whole checkpoint at the measured {rate}; at that rate the budget holds {size}. "
        "A small state overstates fixed costs and may sit in the page cache: the rate may be wrong in both directions.",
        "Assumed: the node and its warm server are there. Not measured, and to be paid from what is left: a replacement node, CUDA and "
        "NCCL start-up, state read from remote storage.",
    ]


def size_in_words(mib: float) -> str:
    """A size in KiB, MiB or GiB with three digits. Args: mib, 2**20 bytes."""
    unit, value = next(((unit, mib / scale) for unit, scale in (("GiB", 1024.0), ("MiB", 1.0)) if mib >= scale), ("KiB", mib * 1024))
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def measured_s(recovery: Recovery) -> float:
    """Total seconds, or NaN when any segment is not a finite time: a broken clock may not pass."""
    times = [float(getattr(recovery, segment)) for segment in (*SEGMENTS, "total_s")]
    return recovery.total_s if all(math.isfinite(value) and value >= 0 for value in times) else math.nan

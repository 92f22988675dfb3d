"""What is said of a straggler, and what to do about it."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from validation.finding import Finding
from validation.straggling_cause import Reason, steps_text
from validation.straggling_lateness import Lateness
from validation.straggling_patterns import Late, Places, lost_share
from validation.straggling_shared import Rotation, Stretch
from validation.straggling_table import Steps

CERTAIN = 1.1  # slowdown from which a finding is of high confidence
NAMED = 12  # late steps and ranks that evidence lists
ACTIONS = {
    "data": "look at that rank's input: its disk, its share of the files, its loader's workers; swap its share with another rank's",
    "compute": "drain that rank's host and run a device check (clock, temperature, memory errors); profile the phase on that rank",
    "host_cpu": "look for other work on that host's processor (load, pinned cores, frequency); move it or the rank",
    "gc": "switch automatic garbage collection off, collect on all ranks together every n steps, and freeze objects after warm-up",
    "checkpoint_io": "save behind training's back or spread the work over ranks; give that group a longer time-out until then",
    "compile": "compile before the first step on all ranks, keep shapes the same, and share the compilation cache",
    "imbalance": "deal out work by its cost (samples or tokens) and not by count; cap the largest micro-batch",
    "network": "test that rank's link and switch port; compare the transfer of the same collective on another host",
    "uniform": "look at what the ranks share: host processors, disk, network, clocks, and what else ran at that time",
}  # cause -> what the operator does
REASONS = {
    "data": "its input comes late", "compute": "its device or its own work is slow", "host_cpu": "everything on its processor is slow",
    "gc": "pauses like those of garbage collection", "checkpoint_io": "it saves while the others wait", "compile": "it is still compiling",
    "imbalance": "it has more work than the others", "network": "its link is slow",
}  # fmt: skip
PHASE_WORDS = {"": "between its steps", "collective": "in its transfers"}

Explained = tuple[Late, Reason]


def late_finding(late: Lateness, group: Sequence[Explained], hosts: Mapping[int, str], culprits: Collection[int]) -> Finding:
    """Say of ranks that they are late, for one reason and in the same steps; `culprits` are the ranks of all groups: nobody's victims."""
    table, why = late.table, group[0][1]
    places = [one.place for one, _ in group]
    ranks = tuple(int(table.ranks[place]) for place in sorted(places))
    steps = np.unique(np.concatenate([one.steps for one, _ in group]))
    is_episode = group[0][0].is_episode
    slowdown = late.slowdown(places, steps) if is_episode else 1 / (1 - min(0.999, lost_share(late, places, steps)))
    lateness = float(np.mean([late.excess[one.steps, one.place].mean() for one, _ in group]))
    host = _common_host(ranks, hosts)
    cause = "host_cpu" if host and why.cause == "compute" else why.cause
    evidence = [_late_line(late, one, its) for one, its in group[:NAMED]]
    if host:
        evidence.append(f"ranks {_listed(ranks)} share host {host}")
    evidence.append(_idle_line(table, np.arange(steps[0], steps[-1] + 1), ranks))
    return Finding(
        verdict="straggler", kind="late_rank", ranks=ranks, cause=cause, step=int(table.steps[steps[0]]), phase=why.phase,
        slowdown=slowdown, lateness_s=lateness / 1e3, waiting=tuple(int(rank) for rank in table.ranks if rank not in culprits),
        explanation=_late_words(ranks, why, cause, f"{lateness:.4g} ms after the others in {steps_text(late, steps)}", slowdown),
        action=ACTIONS[cause], evidence=(*evidence, *table.notes), confidence="high" if slowdown >= CERTAIN else "medium",
    )  # fmt: skip


def _common_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Label of the host that several ranks share, "" where they do not."""
    labels = {hosts.get(rank, "") for rank in ranks}
    return labels.pop() if len(ranks) > 1 and len(labels) == 1 else ""


def _late_line(late: Lateness, one: Late, why: Reason) -> str:
    rhythm = f", every {one.period} steps" if one.period else ""
    behind = float(late.excess[one.steps, one.place].mean())
    return f"rank {late.table.ranks[one.place]}: {steps_text(late, one.steps)}, {behind:.4g} ms behind the others{rhythm}; {why.evidence}"


def _idle_line(table: Steps, steps: Places, ranks: Sequence[int]) -> str:
    """Mean idle time by rank: of the culprits and of those who waited longest."""
    waits = table.wait[steps].mean(axis=0)
    longest = np.argsort(-waits, kind="stable")[:NAMED]
    shown = sorted({*longest.tolist(), *np.flatnonzero(np.isin(table.ranks, ranks))[:NAMED].tolist()})
    more = " ..." if len(shown) < len(waits) else ""
    return "mean idle time: " + ", ".join(f"rank {table.ranks[place]} {waits[place]:.4g} ms" for place in shown) + more


def _late_words(ranks: Sequence[int], why: Reason, cause: str, when: str, slowdown: float) -> str:
    """One or two sentences about late ranks."""
    who, arrives = ("Rank", "arrives") if len(ranks) == 1 else ("Ranks", "arrive")
    where = PHASE_WORDS.get(why.phase, f"in {why.phase}")
    walls = " The walls of that phase are alike on all ranks, for the others wait inside it." if why.is_hidden else ""
    return f"{who} {_listed(ranks)} {arrives} {when}, lost {where}: {REASONS[cause]}; steps take {slowdown:.2f} times as long.{walls}"


def rotation_finding(late: Lateness, found: Rotation, cause: str) -> Finding:
    """Say that pauses take turns: everybody waits for each of them, and no rank is to be drained."""
    table = late.table
    mine = late.last[found.rows] == found.columns
    total, lost = float(table.step_ms.sum()), float(late.gain[np.unique(found.rows[mine])].sum())
    turns = [f"rank {table.ranks[c]} at step {table.steps[r]}" for r, c in zip(found.rows[:NAMED], found.columns[:NAMED], strict=True)]
    more = " ..." if len(found.rows) > NAMED else ""
    rhythm, hit = f", every {found.period} steps," if found.period else "", len(np.unique(found.columns))
    return Finding(
        verdict="straggler", kind="late_rank", cause=cause, step=int(table.steps[found.rows[0]]), lateness_s=found.length_ms / 1e3,
        slowdown=total / max(total - lost, 1e-6),
        explanation=f"{len(found.rows)} pauses of about {found.length_ms:.4g} ms{rhythm} hit {hit} ranks in turn, and everybody "
        "waits for each. Medians look perfect; there is no rank to drain.",
        action=ACTIONS[cause], evidence=(f"late in turn: {', '.join(turns)}{more}", *table.notes),
    )  # fmt: skip


def uneven_finding(late: Lateness, steps: Places) -> Finding:
    """Say that samples are dealt out unevenly, to other ranks in each step."""
    table = late.table
    total, waited = float(table.step_ms.sum()), float(table.wait.mean(axis=1).sum())
    return Finding(
        verdict="straggler", kind="late_rank", cause="imbalance", phase="forward", step=int(table.steps[steps[0]]),
        slowdown=total / max(total - waited, 1e-6), lateness_s=float(late.gain[steps].mean()) / 1e3,
        explanation="The rank with most samples is last, another one in each step: work is dealt out unevenly. No rank is to be drained.",
        action=ACTIONS["imbalance"], evidence=(f"lateness follows samples in {steps_text(late, steps)}", *table.notes),
    )  # fmt: skip


def stretch_finding(late: Lateness, found: Stretch) -> Finding:
    """Say that steps were slow on all ranks alike."""
    table, text = late.table, steps_text(late, found.steps)
    phase = "collective" if found.phase == "transfer" else found.phase
    return Finding(
        verdict="straggler", kind="uniform_slowness", step=int(table.steps[found.steps[0]]), phase=phase, slowdown=found.ratio,
        explanation=f"All ranks were slow in {text}: {found.ratio:.2f} times the other steps, most of it in {phase}. No rank is to blame.",
        action=ACTIONS["uniform"],
        evidence=(f"{found.ranks_slower} of {len(table.ranks)} ranks are slower there, waiting left out", *table.notes),
    )  # fmt: skip


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:NAMED])) + (" ..." if len(ranks) > NAMED else "")

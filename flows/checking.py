"""`seatrial check`: gates held on a recipe without a release. Nothing is registered, decided or served."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.equivalence_probe import probe_equivalence
from flows.plan import ReleasePlan, ReleaseRequest, make_plan
from flows.probes import Bench
from flows.recovery_probe import probe_recovery
from infra.settings import load_settings
from validation.canonical import plain
from validation.equivalence import judge_equivalence
from validation.errors import ConfigError, InputError, ReleaseError
from validation.recovery import judge_recovery
from validation.verdict import GateVerdict, inconclusive

CHECKABLE = ("gradient_equivalence", "kill_and_resume")  # gates that need nothing but a recipe

Say = Callable[[str], None]


def check(
    recipe: str, gates: Sequence[str], world_sizes: Sequence[int], folder: Path, *, policy_text: str = "", say: Say = print
) -> dict[str, GateVerdict]:
    """Hold gates one after the other.

    Args: gates, of CHECKABLE; world_sizes, () for the policy's; folder, takes the runs.
    Raises: InputError before anything is run when the recipe, a gate's name or the world sizes cannot work.
    """
    plan = plan_of(recipe, gates, world_sizes, folder, policy_text)
    return {gate: check_gate(plan, gate, say)[0] for gate in gates}


def check_document(
    recipe: str, gates: Sequence[str], world_sizes: Sequence[int], folder: Path, *, policy_text: str = "", say: Say = print
) -> dict[str, Any]:
    """`check` as the document of `seatrial check --json`."""
    plan = plan_of(recipe, gates, world_sizes, folder, policy_text)
    return {"recipe": recipe, "world_sizes": plan.world_sizes, "gates": [gate_document(*check_gate(plan, gate, say)) for gate in gates]}


def plan_of(recipe: str, gates: Sequence[str], world_sizes: Sequence[int], folder: Path, policy_text: str) -> ReleasePlan:
    """What is to be checked, found possible. Raises InputError."""
    if unknown := sorted(set(gates) - set(CHECKABLE)):
        raise ConfigError(
            f"gate {', '.join(unknown)} cannot be held without a release, so nothing was run. Choose out of {', '.join(CHECKABLE)}, or "
            "run `seatrial release`."
        )
    if world_sizes and not (min(world_sizes) >= 1 and max(world_sizes) > 1):
        raise ConfigError(
            f"world sizes {', '.join(map(str, world_sizes))} cannot be checked: these gates need at least two ranks, and none below one. "
            "Nothing was run. Give e.g. 1,2,4."
        )
    request = ReleaseRequest(recipe=recipe, policy_text=policy_text, world_sizes=tuple(world_sizes))
    return make_plan(request, load_settings(home=folder), gates=gates)


def check_gate(plan: ReleasePlan, gate: str, say: Say) -> tuple[GateVerdict, float, float]:
    """One gate's verdict, its wall clock and its worker-seconds; a probe that breaks makes it inconclusive."""
    folder = plan.folder / gate
    folder.mkdir()
    bench = Bench(plan=plan, gate=gate, say=say, folder=folder)
    began = time.monotonic()
    try:
        verdict = _held(gate, bench)
    except InputError:
        raise
    except ReleaseError as error:
        verdict = inconclusive(gate, reason=f"its probe could not be run: {error}", action="mend the cause, then check again")
    return verdict, time.monotonic() - began, bench.worker_seconds


def _held(gate: str, bench: Bench) -> GateVerdict:
    if gate == "gradient_equivalence":
        return judge_equivalence(probe_equivalence(bench), bench.plan.policy.gradient_equivalence)
    return judge_recovery(probe_recovery(bench), bench.plan.policy.kill_and_resume)


def gate_document(verdict: GateVerdict, seconds: float, worker_seconds: float) -> Mapping[str, Any]:
    """A gate of `seatrial check --json`: JSON types, NaN and infinities as words."""
    document: Mapping[str, Any] = plain({
        "name": verdict.gate, "outcome": verdict.outcome, "seconds": seconds, "worker_seconds": worker_seconds, "reason": verdict.reason,
        "action": verdict.action, "checks": verdict.checks, "control": verdict.control, "tables": verdict.tables, "notes": verdict.notes,
    })  # fmt: skip
    return document

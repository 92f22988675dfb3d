"""Drills: failures that are really caused in a release, so that readiness is scored on detectors that fired."""

from collections.abc import Mapping

from flows.drill_records import on_record
from flows.drill_release import of_control, torn_checkpoint
from flows.drill_scenes import drill_group
from flows.drill_stage import Stage
from flows.probes import Bench
from infra.report import GateLine
from validation.failure_modes import default_modes
from validation.records import Drill, FallbackCheck, ReadinessRecords

# gate -> the drill that its positive control is
CONTROL_DRILLS = {
    "data_contract": "bad_data",
    "gradient_equivalence": "wrong_gradient",
    "kill_and_resume": "repeated_data",
    "scaling": "straggler",
    "slice_quality": "slice_regression",
}


def probe_readiness(bench: Bench, lines: Mapping[str, GateLine], fallbacks: tuple[FallbackCheck, ...]) -> ReadinessRecords:
    """Collect what fired in this release's gates, and cause what they did not: a hang, a skipped collective, a torn checkpoint.

    Of modes that no release fires, the drills on record for this code are taken along.
    """
    fired = [drill for gate, name in CONTROL_DRILLS.items() if gate in lines and (drill := control_drill(name, lines[gate]))]
    if "kill_and_resume" in lines:
        fired.append(kill_drill(lines["kill_and_resume"]))
    stage = Stage(bench.job)
    fired += [drill_group("hang", stage), drill_group("skipped_collective", stage, only=0), torn_checkpoint(stage)]
    bench.worker_seconds += stage.worker_seconds
    modes = default_modes(bench.plan.facts.card.owner)
    asked = {mode.drill for mode in modes if mode.in_release}  # an earlier drill cannot stand in for one of these
    recorded = [drill for drill in on_record(bench.plan.home) if drill.name not in asked]
    return ReadinessRecords(
        modes=modes,
        drills=(*fired, *recorded),
        costs=costs(lines, price=bench.plan.policy.scaling.price_per_device_hour.value, devices=bench.plan.machine.devices),
        fallbacks=fallbacks,
        gates={gate: line.verdict.outcome for gate, line in lines.items()},
    )


def control_drill(name: str, line: GateLine) -> Drill | None:
    """A gate's positive control as a drill: the planted defect, whether the gate saw it, and whether such a candidate is refused."""
    return of_control(name, line.verdict, 0.0) if line.verdict.control else None


def kill_drill(line: GateLine) -> Drill:
    """kill_and_resume's SIGKILLs: they fired (its evidence is complete), were noticed and recovered from."""
    return Drill(
        name="rank_killed",
        fired=_all_passed(line, "required evidence"),
        detected=_all_passed(line, "recovery time"),
        mitigated=_all_passed(line, "difference from the twin"),
        detail=line.verdict.reason,
    )


def _all_passed(line: GateLine, name: str) -> bool:
    found = [item.passed for item in line.verdict.checks if item.name.startswith(name)]
    return bool(found) and all(found)


def costs(lines: Mapping[str, GateLine], *, price: float, devices: int) -> dict[str, float]:
    """What the gates cost: a gate holds every device of the machine while it runs. Price in USD a device-hour."""
    wall_s = sum(line.seconds for line in lines.values())
    device_hours = wall_s * devices / 3600
    return {
        "wall_s": wall_s,
        "worker_seconds": sum(line.worker_seconds for line in lines.values()),
        "device_hours": device_hours,
        "usd": device_hours * price,
    }

"""Drills: failures that are really caused in a release, so that readiness is scored on detectors that fired."""

import time
from collections.abc import Mapping

from flows.probes import Bench
from infra.report import GateLine
from trainer import ranks
from trainer.config import Fault
from validation.decision import decide
from validation.errors import RankError
from validation.failure_modes import default_modes
from validation.records import Drill, FallbackCheck, ReadinessRecords
from validation.verdict import GateVerdict, Outcome

HANG_DEADLINE_S = 6.0  # forming the group and two steps take well under two seconds; the rest is the hang
# gate -> the drill that its positive control is
CONTROL_DRILLS = {
    "data_contract": "bad_data",
    "gradient_equivalence": "wrong_gradient",
    "kill_and_resume": "repeated_data",
    "scaling": "straggler",
    "slice_quality": "slice_regression",
}


def probe_readiness(bench: Bench, lines: Mapping[str, GateLine], fallbacks: tuple[FallbackCheck, ...]) -> ReadinessRecords:
    """Collect what fired in this release's gates, and cause what they did not: a hang, a skipped collective, a torn checkpoint."""
    fired = [drill for gate, name in CONTROL_DRILLS.items() if gate in lines and (drill := control_drill(name, lines[gate]))]
    if "kill_and_resume" in lines:
        fired.append(kill_drill(lines["kill_and_resume"]))
    fired += [hang_drill(bench), skipped_collective_drill(bench), torn_checkpoint_drill(bench)]
    return ReadinessRecords(
        modes=default_modes(bench.plan.facts.card.owner),
        drills=tuple(fired),
        costs=costs(lines, price=bench.plan.policy.scaling.price_per_device_hour.value, devices=bench.plan.machine.devices),
        fallbacks=fallbacks,
        gates={gate: line.verdict.outcome for gate, line in lines.items()},
    )


def control_drill(name: str, line: GateLine) -> Drill | None:
    """A gate's positive control as a drill: the planted defect, and whether the gate saw it."""
    control = line.verdict.control
    if control is None:
        return None
    refused = control.caught and is_refused(line.verdict.gate)
    return Drill(name=name, fired=True, detected=control.caught, mitigated=refused, detail=f"{control.planted}: {control.detail}")


def is_refused(gate: str) -> bool:
    """Whether a candidate that fails this gate is kept from serving: the decision's own word for it."""
    failed = GateVerdict(gate=gate, outcome=Outcome.FAIL, reason="planted", action="none")
    return decide(verdicts=[failed], required=[gate], fallbacks=()).decision != "promoted"


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


def hang_drill(bench: Bench) -> Drill:
    """Rank 1 of 2 stops before a collective; rank 0 waits for it. The group's deadline has to end both and say where each stood."""
    fault = Fault(kind="delay", rank=1, step=2, phase="collective", ms=1e9)
    error = _broken_run(bench, "drill-hang", fault, deadline_s=HANG_DEADLINE_S)
    seen = "deadline" in error and "rank 0" in error and "rank 1" in error
    detail = error or "the run ended although rank 1 never arrived"
    return Drill(name="hang", fired=bool(error), detected=seen, mitigated=bool(error), detail=detail)


def skipped_collective_drill(bench: Bench) -> Drill:
    """Rank 1 of 2 leaves out one step's collective and goes on; the next one has to find the ranks out of step."""
    fault = Fault(kind="skip", rank=1, step=2, phase="collective")
    error = _broken_run(bench, "drill-skip", fault, deadline_s=4 * HANG_DEADLINE_S)
    seen = "left out a collective" in error
    detail = error or "the run ended although rank 1 skipped one"
    return Drill(name="skipped_collective", fired=bool(error), detected=seen, mitigated=seen, detail=detail)


def _broken_run(bench: Bench, label: str, fault: Fault, *, deadline_s: float) -> str:
    """The first line of the error that ended a run of two ranks with this fault; "" if it ended well."""
    job = bench.job(label, world_size=2, steps=10, faults=(fault,), deadline_s=deadline_s, stall_s=600.0)
    started = time.monotonic()
    try:
        ranks.run_group(job)
    except RankError as error:
        return str(error).partition("\n")[0]
    finally:
        bench.worker_seconds += job.world_size * (time.monotonic() - started)
    return ""


def torn_checkpoint_drill(bench: Bench) -> Drill:
    """SIGKILL while a checkpoint is being written: the torn one must not be trusted, the run must end with the twin's bytes.

    Rank 0 dies with every file of checkpoint 6 on disk and no seal. Saves run behind training, one after the other: checkpoint 3 was sealed
    before 6 was begun, however far training had come.
    """
    common: dict[str, object] = {"world_size": 2, "steps": 8, "checkpoint_every": 3}
    fault = Fault(kind="kill", rank=0, step=5, phase="seal")
    twin, _ = bench.run("drill-torn-twin", **common)
    torn, _ = bench.run("drill-torn", faults=(fault,), max_restarts=1, **common)
    resumed = torn.recoveries[0].resumed_from_step if torn.recoveries else -1
    return Drill(
        name="torn_checkpoint",
        fired=str(fault) in torn.faults_fired,
        detected=resumed == 3,
        mitigated=torn.state_sha256 == twin.state_sha256 and torn.ledger_sha256 == twin.ledger_sha256,
        detail=f"killed while checkpoint 6 was written, resumed from sealed checkpoint {resumed}, final bytes "
        + ("equal the twin's" if torn.state_sha256 == twin.state_sha256 else "differ from the twin's"),
    )


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

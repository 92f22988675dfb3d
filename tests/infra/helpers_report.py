"""Realistic releases to show: one promoted, one refused, with every kind of plot."""

import math
from collections.abc import Sequence
from dataclasses import replace

from infra.report import CostLine, GateLine, ReleaseReport, ReportCard, with_waivers
from validation.canonical import digest
from validation.verdict import Check, GateVerdict, Plot, Series, Table, check, conclude, controlled, equal
from validation.waivers import Approval, Waiver

PASSED_REASON = {
    "data_contract": "both frames are what the recipe says; nothing from after the cutoff is in them",
    "gradient_equivalence": "W = 1, 2, 4 and 8 end with the same bits, and every tensor is within 8 x its own float noise",
    "kill_and_resume": "two kills cost no sample and no bit; back within 2.9 s",
    "scaling": "efficiency stays above the floor at every world size",
    "slice_quality": "no slice of 45 is worse than last known-good, baseline or rule by more than the margin",
    "readiness": "11 of 12 rubric points, no critical item open",
}
SEGMENTS = {"detect": (0.02, 0.03), "tear down": (0.11, 0.15), "rendezvous": (0.08, 0.31), "load": (0.42, 0.47), "first step": (1.1, 1.9)}


def contract_gate() -> GateVerdict:
    checks = [
        check(
            f"rows of {frame}", rows, ">=", floor, unit="rows", source="recipe's contract", where=frame, action="fetch the missing months"
        )
        for frame, rows, floor in (("train", 245_817.0, 200_000.0), ("judge", 54_803.0, 40_000.0))
    ]
    checks.append(
        check("columns known after the cutoff", 0.0, "==", 0.0, unit="columns", source="recipe's contract", action="drop the column")
    )
    return conclude("data_contract", checks, passed_reason=PASSED_REASON["data_contract"])


def equivalence_gate() -> GateVerdict:
    sha = digest("state")
    checks = [
        equal("final state", sha, sha, source="exact leg: equal bits", where=f"W={w}", action="compare the first diverging step")
        for w in (2, 4, 8)
    ]
    checks += [
        check(
            "gradient error in noise units",
            1.2 + 0.3 * w,
            "<=",
            8.0,
            unit="x noise",
            source="policy: 8 x own float noise",
            where=f"fast leg, W={w}, encoder.0.weight",
        )
        for w in (1, 2, 4, 8)
    ]
    plot = Plot(
        title="Distance to the float64 reference, worst tensor of each leg", kind="line", x_label="world size (ranks)",
        y_label="error / float noise (ratio)", y_log=True, reference=8.0, reference_label="limit",
        series=(
            Series(name="logic (float64)", x=(1.0, 2.0, 4.0, 8.0), y=(2e-9, 2e-9, 3e-9, 3e-9)),
            Series(name="training (exact float32)", x=(1.0, 2.0, 4.0, 8.0), y=(1.1, 1.1, 1.1, 1.1)),
            Series(name="fast (torch's reduction)", x=(1.0, 2.0, 4.0, 8.0), y=(1.5, 1.8, 2.4, 3.6)),
            Series(name="planted: scaled by world size", x=(2.0, 4.0, 8.0), y=(8e3, 2.4e4, 5.6e4)),
        ),
    )  # fmt: skip
    return conclude(
        "gradient_equivalence",
        checks,
        passed_reason=PASSED_REASON["gradient_equivalence"],
        plots=[plot],
        notes=["dropout was off in the reference legs", "a defect that all world sizes share is seen by the reference leg only"],
    )


def recovery_gate() -> GateVerdict:
    faults = ("kill:rank=1,step=7,phase=backward", "kill:rank=3,step=21,phase=collective")
    checks = [
        check("recovery time", total, "<=", 900.0, unit="s", source="service objective: eight GPUs back within 15 minutes", where=fault)
        for fault, total in zip(faults, (1.73, 2.86), strict=True)
    ]
    checks.append(equal("final state", digest("twin"), digest("twin"), source="uninterrupted twin", where="W=4, resumed on 2"))
    plot = Plot(
        title="Recovery by segment", kind="bar", x_label="fault", y_label="seconds from death to the next update", stacked=True,
        series=tuple(Series(name=name, x=faults, y=seconds) for name, seconds in SEGMENTS.items()),
        reference=900.0, reference_label="budget",
    )  # fmt: skip
    return conclude("kill_and_resume", checks, passed_reason=PASSED_REASON["kill_and_resume"], plots=[plot])


def scaling_gate(*, efficiency_at_8: float = 0.71) -> GateVerdict:
    sizes = (1.0, 2.0, 4.0, 8.0)
    efficiency = (1.0, 0.93, 0.827, efficiency_at_8)
    low, high = tuple(e - 0.02 * i for i, e in enumerate(efficiency)), tuple(e + 0.02 * i for i, e in enumerate(efficiency))
    action = "look at the phase that costs most: transfer; try a larger lane batch"
    checks = [
        check(
            "efficiency",
            e,
            ">=",
            0.5,
            unit="ratio",
            source="policy: below half, two devices do the work of one",
            where=f"W={w:g}",
            interval=(lo, hi),
            action=action,
        )
        for w, e, lo, hi in zip(sizes, efficiency, low, high, strict=True)
    ]
    plots = [
        Plot(
            title="Scaling efficiency", kind="line", x_label="world size (ranks)", y_label="efficiency (1.0 is linear)", reference=0.5,
            reference_label="floor", series=(Series(name="efficiency", x=sizes, y=efficiency, low=low, high=high),),
        ),
        Plot(
            title="Throughput against linear", kind="line", x_label="world size (ranks)", y_label="throughput (samples/s)",
            series=(
                Series(name="measured", x=sizes, y=(420.0, 781.0, 1390.0, 2386.0)),
                Series(name="linear", x=sizes, y=(420.0, 840.0, 1680.0, 3360.0)),
            ),
        ),
        Plot(
            title="Where a step's time goes", kind="bar", x_label="world size",
            y_label="milliseconds of a step, mean over ranks", stacked=True,
            series=tuple(
                Series(name=name, x=("W=1", "W=2", "W=4", "W=8"), y=y)
                for name, y in {
                    "data": (6.0, 6.1, 6.4, 7.0), "forward": (38.0, 38.5, 39.0, 39.2), "backward": (70.0, 71.0, 71.5, 72.0),
                    "wait": (0.0, 2.0, 13.0, 19.0), "transfer": (0.0, 6.0, 9.0, 21.0), "optimizer": (6.0, 6.0, 6.1, 6.2),
                }.items()
            ),
        ),
        Plot(
            title="Idle time by rank at W=4", kind="bar", x_label="rank", y_label="idle (ms a step)",
            series=(Series(name="idle", x=("rank 0", "rank 1", "rank 2", "rank 3"), y=(33.0, 31.0, 32.0, 0.0)),),
        ),
        Plot(
            title="Quality while training", kind="line", x_label="samples", y_label="ROC AUC", reference=0.66, reference_label="target",
            series=(
                Series(
                    name="ROC AUC", x=tuple(20_480.0 * i for i in range(1, 49)),
                    y=tuple(0.69 - 0.14 * math.exp(-i / 9) for i in range(1, 49)),
                ),
            ),
        ),
    ]  # fmt: skip
    rows = tuple((int(w), 420.0 * w * e, e, 0.05 * w) for w, e in zip(sizes, efficiency, strict=True))
    table = Table(title="Points", columns=("ranks", "samples/s", "efficiency", "USD an hour"), rows=rows)
    return conclude(
        "scaling",
        checks,
        passed_reason=PASSED_REASON["scaling"],
        plots=plots,
        tables=[table],
        notes=["one machine: no network between ranks"],
    )


def slice_names() -> tuple[str, ...]:
    carriers = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
    airports = (
        "ATL",
        "BOS",
        "CLT",
        "DCA",
        "DEN",
        "DFW",
        "DTW",
        "FLL",
        "IAH",
        "LAX",
        "LGB",
        "MCO",
        "MIA",
        "ORD",
        "PHX",
        "SEA",
        "SFO",
        "TPA",
    )
    return (
        *(f"origin={name}" for name in ("EWR", "JFK", "LGA")),
        *(f"carrier={name}" for name in carriers),
        *(f"dest={name}" for name in airports),
        *(f"month={name}" for name in ("10", "11")),
        *(f"part_of_day={name}" for name in ("dawn", "morning", "noon", "afternoon", "evening", "night")),
    )


def slice_gate(*, regressed: str = "") -> GateVerdict:
    names = slice_names()
    delta = {name: 0.02 + 0.25 * math.sin(3.7 * i) for i, name in enumerate(names)}
    wide = {name: 0.12 + 0.1 * abs(math.cos(2.1 * i)) for i, name in enumerate(names)}
    if regressed:
        delta[regressed], wide[regressed] = -1.914, 0.31
    ends = {name: (delta[name] - wide[name], delta[name] + wide[name]) for name in names}
    checks = [_slice_check(name, delta[name], ends[name]) for name in names]
    checks.append(check("latency, 95th percentile", 3.42, "<=", 50.0, unit="ms", source="policy: interactive budget for one row"))
    plot = Plot(
        title="Utility of the candidate minus last known-good, by slice", kind="point", x_label="",
        y_label="minutes per flight (above 0 is better)",
        series=(
            Series(
                name="difference", x=names, y=tuple(delta.values()), low=tuple(lo for lo, _ in ends.values()),
                high=tuple(hi for _, hi in ends.values()),
            ),
        ),
        reference=-0.72, reference_label="margin",
    )  # fmt: skip
    who = ("candidate", "last known-good", "baseline", "rule")
    contenders = Plot(
        title="Mean utility by contender", kind="bar", x_label="contender", y_label="minutes per flight",
        series=(
            Series(name="October", x=who, y=(4.2, 4.1, 3.6, 1.2), low=(4.0, 3.9, 3.4, 1.0), high=(4.4, 4.3, 3.8, 1.4)),
            Series(name="November", x=who, y=(3.9, 3.9, 3.1, 1.0), low=(3.7, 3.7, 2.9, 0.8), high=(4.1, 4.1, 3.3, 1.2)),
        ),
    )  # fmt: skip
    calibration = Plot(
        title="Calibration gap by carrier, every contender", kind="point", x_label="", y_label="|mean confidence - hit rate|",
        series=tuple(
            Series(
                name=name, x=tuple(n for n in names if n.startswith("carrier")),
                y=tuple(abs(0.06 + shift + 0.05 * math.sin(i * (2 + shift * 9))) for i in range(16)),
            )
            for name, shift in (("candidate", 0.0), ("last known-good", 0.012), ("baseline", 0.03))
        ),
        reference=0.15, reference_label="limit",
    )  # fmt: skip
    return conclude(
        "slice_quality",
        checks,
        passed_reason=PASSED_REASON["slice_quality"],
        plots=[plot, contenders, calibration],
        notes=["slices under 300 flights are not judged: carrier=HA, carrier=OO", "December's outcomes are not known yet"],
    )


def _slice_check(name: str, delta: float, ends: tuple[float, float]) -> Check:
    return check(
        "utility against last known-good", delta, ">=", -0.72, unit="min/flight", where=name, interval=ends,
        source="policy: a tenth of a standard deviation of utility",
        action=f"look at the rows of {name} that changed their decision; the data or the loss weighs them wrongly",
    )  # fmt: skip


def readiness_gate(*, score: float = 0.917) -> GateVerdict:
    checks = [
        check(
            "rubric score",
            score,
            ">=",
            0.8,
            unit="ratio",
            source="policy: course checkpoint",
            action="name an owner for every failure mode",
        )
    ]
    table = Table(
        title="Failure modes",
        columns=("mode", "detector", "owner", "drill fired"),
        rows=(("a rank dies", "leader's process watch", "platform", "yes"), ("a slice regresses", "slice_quality", "flights team", "yes")),
    )
    return conclude("readiness", checks, passed_reason=PASSED_REASON["readiness"], tables=[table])


def with_control(verdict: GateVerdict, planted: str = "one lane's gradient counted twice", *, caught: bool = True) -> GateVerdict:
    observed = 5.6e4 if caught else 1.0
    on_planted = conclude(
        verdict.gate, [check("planted", observed, "<=", 8.0, unit="x noise", source="policy", where="rank 1")], passed_reason="nothing seen"
    )
    return controlled(verdict, planted, "planted", on_planted)


def line(verdict: GateVerdict, *, seconds: float = 12.3, attempt: int = 1, reuse_reason: str = "") -> GateLine:
    return GateLine(
        verdict=verdict, attempt=attempt, reused=bool(reuse_reason), reuse_reason=reuse_reason, seconds=seconds,
        worker_seconds=seconds * 4, evidence_sha256=digest(verdict),
    )  # fmt: skip


def release(gates: Sequence[GateVerdict], **changes: object) -> ReleaseReport:
    lines = tuple(line(with_control(verdict), seconds=4.7 * (i + 1) ** 1.5) for i, verdict in enumerate(gates))
    report = ReleaseReport(
        release_id="flights-20250114-093012-7f3a", recipe="flights",
        card=ReportCard(
            question="Will this flight arrive 15 or more minutes late? Decided at its scheduled departure.",
            action="warn the passengers and hold the connection", owner="flights team", utility_unit="minutes per flight",
            notes=("cancelled and diverted flights have no label and are left out",),
        ),
        decision="promoted", serving_kind="candidate", serving_version="7", candidate_version="7",
        reason="every required gate passed and the evidence verified", action="", gates=lines,
        cost=(
            CostLine(name="wall clock", amount=183.2, unit="s", note="from start to decision"),
            CostLine(name="worker time", amount=611.9, unit="worker-seconds", note="ranks x seconds, all gates"),
            CostLine(name="accelerator price", amount=0.0085, unit="USD", note="0.05 USD a device-hour (policy)"),
            CostLine(name="storage", amount=None, unit="MiB", note=""),
        ),
        started_at="2025-01-14T09:30:12Z", finished_at="2025-01-14T09:33:15Z",
        digests={name: digest(name) for name in ("code", "data", "config", "policy", "machine")},
        machine="cpu, 2 cores, 15.6 GiB, Linux x86_64, Python 3.11, torch 2.13.0",
    )  # fmt: skip
    return replace(report, **changes)  # type: ignore[arg-type]


def promoted() -> ReleaseReport:
    report = release([contract_gate(), equivalence_gate(), recovery_gate(), scaling_gate(), slice_gate(), readiness_gate()])
    reused = line(
        with_control(equivalence_gate()), reuse_reason="code, data, config, policy and machine digests equal those of flights-20250113-2210"
    )
    again = replace(report.gates[3], attempt=2)
    return replace(report, gates=(report.gates[0], reused, report.gates[2], again, *report.gates[4:]))


def refused() -> ReleaseReport:
    gates = [
        contract_gate(),
        equivalence_gate(),
        recovery_gate(),
        scaling_gate(efficiency_at_8=0.53),
        slice_gate(regressed="carrier=EV"),
        readiness_gate(),
    ]
    verdict = gates[4]
    return release(
        gates, decision="fell_back", serving_kind="last_known_good", serving_version="6",
        reason="slice_quality failed and scaling is inconclusive; version 6 is the last version whose evidence verifies",
        action=f"{verdict.action}; then run `seatrial gate slice_quality --release flights-20250114-093012-7f3a`",
    )  # fmt: skip


def conditional() -> ReleaseReport:
    """Five gates pass, scaling is inconclusive and waived, a person said yes."""
    report = release(
        [contract_gate(), equivalence_gate(), recovery_gate(), scaling_gate(efficiency_at_8=0.53), slice_gate(), readiness_gate()]
    )
    waiver = Waiver(
        gate="scaling", by="Ada Lovelace", reason="one device until March", made_at="2025-01-14T09:40:00+00:00",
        expires_at="2025-02-13T09:40:00+00:00", evidence=report.gates[3].evidence_sha256, attestation=digest("waiver"),
    )  # fmt: skip
    approval = Approval(
        by="Grace Hopper", reason="read the report", approved=True, requested_at="2025-01-14T09:41:00+00:00",
        made_at="2025-01-14T10:44:20+00:00", expires_at="2025-01-21T10:44:20+00:00", basis=digest("basis"), attestation=digest("approval"),
    )  # fmt: skip
    return replace(report, gates=with_waivers(report.gates, [waiver]), approval=approval)

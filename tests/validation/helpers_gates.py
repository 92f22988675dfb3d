"""Small frames and records for the data, slice and readiness gates; every builder makes evidence that passes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from validation.contract import Column, DataContract
from validation.failure_modes import default_modes
from validation.policy import parse_policy
from validation.records import Drill, FallbackCheck, ReadinessRecords, SliceRecords
from validation.slices import plant, smallest_slice
from validation.verdict import Control, GateVerdict, Outcome

SLICE_POLICY = parse_policy().slice_quality
READINESS_POLICY = parse_policy().readiness


def contract_spec_of_two(**changes: Any) -> DataContract:
    """A contract with a number, a closed category and a column from after the cutoff."""
    given: dict[str, Any] = {
        "columns": {"hour": Column(kind="number", minimum=0, maximum=23, max_null_share=0.1),
                    "carrier": Column(kind="category", allowed=("AA", "UA"))},
        "label": "late", "event_time": "at", "known_after_cutoff": ("arr_delay", "late"), "min_rows": {"train": 50, "judge": 50},
        "period": {"train": ("2013-01-01", "2013-02-01"), "judge": ("2013-02-01", "2013-03-01")}, "max_gap_days": 3.0,
    }  # fmt: skip
    return DataContract(**{**given, **changes})


def contract_frame(split: str = "train", rows: int = 100) -> pd.DataFrame:
    """Rows evenly over the split's month, to within half a day of its end."""
    start = {"train": "2013-01-01", "judge": "2013-02-01"}[split]
    days = {"train": 30.5, "judge": 27.5}[split]
    step = np.arange(rows)
    at = pd.Timestamp(start) + pd.to_timedelta(step * days / max(rows - 1, 1), unit="D")
    return pd.DataFrame({"hour": step % 24 * 1.0, "carrier": np.where(step % 2, "AA", "UA"), "late": (step % 5 == 0) * 1.0, "at": at})


def contract_frames() -> dict[str, pd.DataFrame]:
    """Both splits with ids that they do not share."""
    return {split: contract_frame(split).assign(sample_id=range(first, first + 100)) for split, first in (("train", 0), ("judge", 1000))}


def outcomes(days: int = 60, per_day: int = 20, seed: int = 0, better: float = 0.3) -> pd.DataFrame:
    """Paired outcomes of candidate, baseline and rule; samples of a day share luck, the candidate is `better` by that many sds."""
    random = np.random.default_rng(seed)
    rows = days * per_day
    day = np.repeat(np.arange(days), per_day)
    luck = random.normal(size=rows) + random.normal(size=days)[day] * 0.5
    frame = pd.DataFrame({"sample_id": np.arange(rows), "cluster": day, "carrier": np.where(np.arange(rows) % 2, "AA", "UA")})
    for contender in ("candidate", "baseline", "rule"):
        lead = better if contender == "candidate" else 0.0
        frame[f"utility_{contender}"] = luck + lead + 0.3 * random.normal(size=rows)
        frame[f"loss_{contender}"], frame[f"confidence_{contender}"] = 0.5, 0.25
        frame[f"hit_{contender}"] = (np.arange(rows) % 4 == 0) * 1.0
    frame["hit_candidate"] = (np.arange(rows) // 2 % 4 == 0) * 1.0  # a quarter in either carrier
    return frame


def slice_records(frame: pd.DataFrame | None = None, **changes: Any) -> SliceRecords:
    """Complete slice records on `frame`, planted in its smallest slice."""
    judged = outcomes() if frame is None else frame
    slices: Sequence[str] = changes.get("slices", ("carrier",))
    name = smallest_slice(judged, slices, SLICE_POLICY.min_n.value) if set(slices) <= set(judged) else ""
    given: dict[str, Any] = {
        "outcomes": judged, "slices": tuple(slices), "contenders": ("candidate", "baseline", "rule"), "utility_unit": "minutes",
        "quality_name": "ROC AUC", "quality": {"candidate": 0.7, "baseline": 0.66}, "target_quality": 0.65, "planted_slice": name,
        "planted_outcomes": plant(judged, name) if name else judged, "latency_ms": (2.0,) * 40, "latency_machine": "cpu",
    }  # fmt: skip
    return SliceRecords(**{**given, **changes})


def drills(*, without: str = "", unseen: str = "", unfired: str = "", unmitigated: str = "", recorded: bool = False) -> tuple[Drill, ...]:
    """The drills of every release, and with `recorded` all others on record too: fired, detected and mitigated, but for the named ones."""
    modes = [mode for mode in default_modes("the team") if (recorded or mode.in_release) and mode.drill != without]
    return tuple(
        Drill(
            name=mode.drill, fired=mode.drill != unfired, detected=mode.drill not in (unseen, unfired),
            mitigated=mode.drill not in (unmitigated, unseen, unfired), detail="as planned",
            made_at="" if mode.in_release else "2030-01-01T00:00:00+00:00",
        )
        for mode in modes
    )  # fmt: skip


def fallback(kind: str = "baseline", version: str = "3", *, loaded: bool = True, predicted: bool = True) -> FallbackCheck:
    """A fallback that loads and answers."""
    return FallbackCheck(kind=kind, version=version, loaded=loaded, predicted=predicted, detail="asked for one row")


def readiness_records(**changes: Any) -> ReadinessRecords:
    """Records of an operable release."""
    given: dict[str, Any] = {
        "modes": default_modes("the team"), "drills": drills(), "costs": {"wall_s": 12.0, "worker_seconds": 96.0},
        "fallbacks": (fallback(),), "gates": {"scaling": "pass"},
    }  # fmt: skip
    return ReadinessRecords(**{**given, **changes})


def gate_verdict(gate: str = "scaling", outcome: Outcome = Outcome.PASS, *, caught: bool = True) -> GateVerdict:
    """A verdict with a control."""
    control = Control(planted="a defect", expected="a check", caught=caught, detail="seen" if caught else "not seen")
    return GateVerdict(
        gate=gate, outcome=outcome, reason=f"{gate} said so", action="" if outcome is Outcome.PASS else "mend it", control=control
    )

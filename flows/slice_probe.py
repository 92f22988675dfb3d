"""The probe of slice_quality: candidate, last known-good, baseline and rule on the judge split."""

from pathlib import Path

import pandas as pd

from flows.contenders import Scored
from flows.plan import ReleasePlan
from flows.probes import CALL_DEADLINE_S
from flows.under_way import Candidate
from trainer import ranks
from validation.records import SliceRecords
from validation.slices import plant


def contender_records(plan: ReleasePlan, candidate: Candidate, folder: Path) -> SliceRecords:
    """Score candidate, last known-good, baseline (as registered) and the rule on the judge split."""
    uris = {"candidate": candidate.model_uri, "last_known_good": candidate.last_known_good_uri, "baseline": candidate.baseline_uri}
    out = folder / "outcomes.parquet"
    scored: Scored = ranks.call(
        "flows.contenders:score_contenders", plan.request.recipe, {name: uri for name, uri in uris.items() if uri}, str(out),
        deadline_s=CALL_DEADLINE_S,
    )  # fmt: skip
    outcomes = pd.read_parquet(out)
    column = plan.facts.slices[0]
    planted_slice = f"{column}={outcomes[column].value_counts().sort_index().idxmax()}"
    return SliceRecords(
        outcomes=outcomes, slices=plan.facts.slices, contenders=tuple(scored.quality), utility_unit=plan.facts.card.utility_unit,
        quality_name=plan.facts.card.quality_name, quality=scored.quality, target_quality=plan.facts.target_quality,
        planted_slice=planted_slice, planted_outcomes=plant(outcomes, planted_slice), latency_ms=scored.latency_ms,
        latency_machine=f"{plan.machine.device}, one core",
    )  # fmt: skip

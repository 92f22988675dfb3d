"""From the serving log to what a monitor judges: one version's health, predictions, matured outcomes and input counts up to a day."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from flows.in_service import InService
from flows.serving import SCORES, Origin
from infra.serving_log import Part, ServingLog, parquet_bytes
from trainer import ranks
from validation.drift import Bins, counted
from validation.served import HEALTH_COLUMNS, PREDICTION_COLUMNS, ColumnCounts, MonitorRecords

MATURE_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One version's parts, and how its records are read."""

    service: InService
    origin: Origin
    today: str  # the last day that is over
    waiver_lapsed: str = ""


def day_before(day: str) -> str:
    """The day before, ISO."""
    return (date.fromisoformat(day) - timedelta(days=1)).isoformat()


def records_of(log: ServingLog, scene: Scene) -> tuple[MonitorRecords, tuple[Part, ...]]:
    """The records of the version in service, and the parts that they were read from: those of its days, other versions' included."""
    service = scene.service
    by_day = {day: log.parts(day) for day in log.days(until=scene.today)}
    since = _since(by_day, service.version) or scene.today
    parts = tuple(part for day, found in by_day.items() if day >= since for part in found)
    rows = _rows(log, scene, parts)
    own = tuple(part for part in parts if part.version == service.version)
    answered = rows[rows["answered"].astype(bool)]
    return MonitorRecords(
        model=service.model, version=service.version, model_sha256=service.proof.files_sha256,
        reference_version=service.reference_version or service.version,
        reference_kind="last_known_good" if service.fallbacks and service.fallbacks[0].kind == "last_known_good" else "baseline",
        since=since, today=scene.today, utility_unit=scene.origin.utility_unit, utility_scale=scene.origin.utility_scale,
        slices=scene.origin.slices, health=_health(rows[rows["version"] == service.version]),
        predictions=answered[list(PREDICTION_COLUMNS)].reset_index(drop=True), matured=_matured(scene, rows),
        inputs=tuple(_counts(bins, bins.name, own) for bins in scene.origin.columns),
        scores=() if scene.origin.scores is None else (_counts(scene.origin.scores, SCORES, own),), waiver_lapsed=scene.waiver_lapsed,
    ), parts  # fmt: skip


def _since(by_day: dict[str, tuple[Part, ...]], version: str) -> str:
    """The first day that the version served whole, else the first on which it served at all, "" = none."""
    days = [day for day, parts in by_day.items() if any(part.version == version for part in parts)]
    return next((day for day in days if all(part.version == version for part in by_day[day])), days[0] if days else "")


def _rows(log: ServingLog, scene: Scene, parts: Sequence[Part]) -> pd.DataFrame:
    """Every row of these parts with its day. Beside another fallback than today's a row proves nothing: its shadow score is taken away.

    A version without a fallback is its own: its service is watched, and it is as good as itself.
    """
    tables = [log.table(part).assign(day=part.day) for part in parts]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*_COLUMNS])
    shadow = [name for name in rows.columns if name == "reference_score" or name.removeprefix("reference_score_").isdecimal()]
    if scene.service.fallbacks:
        rows.loc[rows["reference_version"] != scene.service.reference_version, shadow] = np.nan
        return rows
    own = {f"reference_{name}": rows[name] for name in rows.columns if name == "score" or name.removeprefix("score_").isdecimal()}
    return rows.assign(**own)


_COLUMNS = ("row_id", "day", "version", "score", "reference_version", "reference_score", "latency_ms", "answered")


def _health(rows: pd.DataFrame) -> pd.DataFrame:
    """HEALTH_COLUMNS of one version, a row a day."""
    found = [
        (day, len(group), int(group["answered"].sum()), float(group["latency_ms"].quantile(0.95)) if len(group) else float("nan"))
        for day, group in rows.groupby("day", sort=True)
    ]
    return pd.DataFrame(found, columns=list(HEALTH_COLUMNS))


def _matured(scene: Scene, rows: pd.DataFrame) -> pd.DataFrame:
    """Outcomes known by today of this version's rows, by the recipe."""
    own = rows[rows["version"] == scene.service.version].drop(columns=["day", "made_at", "model_sha256", "latency_ms"], errors="ignore")
    with tempfile.TemporaryDirectory() as scratch:
        asked, into = Path(scratch) / "asked.parquet", Path(scratch) / "matured.parquet"
        asked.write_bytes(parquet_bytes(own))
        ranks.call(
            "trainer.serving:mature", scene.service.request.recipe, str(asked), str(into), until=scene.today,
            maturity_days=scene.service.policy.monitoring.maturity_days.value, deadline_s=MATURE_DEADLINE_S,
        )  # fmt: skip
        return pd.read_parquet(into)


def _counts(bins: Bins, name: str, parts: Sequence[Part]) -> ColumnCounts:
    """A column's counts by day; parts of one day add up. A part that was scored before the bins were known has none."""
    by_day: dict[str, tuple[tuple[int, ...], int]] = {}
    for part in parts:
        if (found := part.counts.get(name)) is None:
            continue
        rows, missing = by_day.get(part.day, ((0,) * len(bins.names), 0))
        by_day[part.day] = (tuple(a + b for a, b in zip(rows, found["rows"], strict=True)), missing + int(found["missing"]))
    return counted(bins, by_day)

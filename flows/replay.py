"""December of flights, day by day: a version in service, clean or with a fault, predicted, watched and rolled back (docs/monitoring.md).

A candidate is trained once a machine, and the month scored once for each fault; a replay then builds, for each evening, the records that
the monitor would have read then. With a seed, days are drawn anew with replacement, each whole: other months of the same weather.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from infra.settings import Settings
from trainer import ranks
from trainer.config import TrainJob
from trainer.recipe import code_digest
from trainer.recipes.flights_month import Counts, Month, read_month
from validation import drift, served
from validation.canonical import digest, sha256_hex
from validation.drift import Bins, counted
from validation.errors import ConfigError
from validation.monitoring import MonitorVerdict, judge_monitoring
from validation.policy import Policy, parse_policy
from validation.served import MATURED_COLUMNS, PREDICTION_COLUMNS, ColumnCounts, MonitorRecords

FIRST, DAYS = "2013-12-01", 31
BEGINS = 8  # December's day on which a fault begins, unless told otherwise
CLEAN = "clean"
PROVEN = "proven on "  # before the day, in a check of validation.monitoring
SCORE_DEADLINE_S = 600.0
SCORER = "trainer.recipes.flights_replay"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class December:
    """The month, scored; frames by fault, CLEAN among them."""

    month: Month
    rows: Mapping[str, pd.DataFrame]  # MATURED_COLUMNS (null where no outcome came), slices, score, reference_score, day


def replay(settings: Settings, *, say: Say, seed: int | None = None, regression: str = "", begins: int = BEGINS) -> dict[str, Any]:
    """Replay the month evening by evening until the monitor rolls back or the month is over.

    Args: seed, None = the days as they were; regression, "" = none; begins, the day of the month on which it begins.
    Returns: the document of a replay: "rolled_back" (the day at whose end, "" = never), "days" (the fault's days up to that end), "noticed"
    (the first day, of a fault's if there is one, at whose end the version was called degraded), and each evening's word. "ok" is True when
    a clean month is left alone, and when a faulty one ends in a rollback.
    Raises: ConfigError for a fault, seed or day that there is not.
    """
    if not 1 <= begins <= DAYS:
        raise ConfigError(f"December has no day {begins}, so nothing was replayed. Let the fault begin on a day from 1 to {DAYS}.")
    if seed is not None and seed < 0:
        raise ConfigError(f"the seed {seed} is below 0, so no days can be drawn and nothing was replayed. Give a seed of 0 or more.")
    december = load_december(settings, say)
    if regression and regression not in december.rows:
        known = ", ".join(name for name in december.rows if name != CLEAN)
        raise ConfigError(f"there is no regression '{regression}', so nothing was replayed. Choose one of: {known}.")
    policy = parse_policy()
    evenings = []
    for number in range(1, DAYS + 1):
        today = _day(number)
        found = judge_monitoring(records(december, policy, seed=seed, regression=regression, begins=begins, today=today), policy.monitoring)
        evenings.append({"judged_up_to": today, "health": found.health, "action": found.action, "reason": found.reason})
        say(f"{today}: {found.health}, {found.action}: {found.reason}")
        if found.action == "roll_back":
            break
    first = begins if regression else 1
    ended = evenings[-1]["judged_up_to"] if evenings[-1]["action"] == "roll_back" else ""
    return {
        "ok": bool(ended) == bool(regression), "seed": seed, "regression": regression, "begins": _day(begins) if regression else "",
        "noticed": next((item["judged_up_to"] for item in evenings[first - 1 :] if item["health"] == "degraded"), ""),
        "rolled_back": ended, "days": days_until(ended, begins), "evenings": evenings,
    }  # fmt: skip


def lines(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    what = f"{document['regression']} from {document['begins']} on" if document["regression"] else "a clean month"
    if not document["rolled_back"]:
        noticed = f"called degraded first on {document['noticed']}" if document["noticed"] else "never called degraded"
        return [f"{what}: never rolled back, {noticed}; on the last evening: {document['evenings'][-1]['reason']}"]
    return [
        f"{what}: degraded on {document['noticed']}, rolled back at the end of {document['rolled_back']}, after {document['days']} days"
    ]


def whole_month(
    december: December, policy: Policy, *, seed: int | None, regression: str, begins: int = BEGINS
) -> tuple[str, MonitorVerdict]:
    """The day at whose end the month is rolled back ("" = never), by one judgement at the month's end, and that judgement.

    The day that `replay` finds for outcomes: what was judged once stays judged (tests hold it), so the last look shows every bet.
    """
    today = _day(DAYS)
    found = judge_monitoring(records(december, policy, seed=seed, regression=regression, begins=begins, today=today), policy.monitoring)
    proven = [item.where.partition(PROVEN)[2][:10] for item in found.verdict.checks if item.passed is False and PROVEN in item.where]
    days = sorted(date.fromisoformat(day) + timedelta(days=policy.monitoring.maturity_days.value) for day in proven)
    return (days[0].isoformat() if days else ""), found


def days_until(ended: str, begins: int = BEGINS) -> int:
    """Days of a fault up to the end of the one on which the version was rolled back; 0 = it was not."""
    return (date.fromisoformat(ended) - date.fromisoformat(_day(begins))).days + 1 if ended else 0


def records(december: December, policy: Policy, *, seed: int | None, regression: str, begins: int, today: str) -> MonitorRecords:
    """What the monitor reads when `today` is the last day that is over."""
    drawn = np.arange(1, DAYS + 1) if seed is None else np.random.default_rng(seed).integers(1, DAYS + 1, DAYS)
    month, parts = december.month, []
    names = [regression if regression and number >= begins else CLEAN for number in range(1, DAYS + 1)]
    shown = [number for number in range(1, DAYS + 1) if _day(number) <= today]
    for number in shown:
        rows = december.rows[names[number - 1]]
        taken = rows[rows["day"] == _day(int(drawn[number - 1]))]
        known = _day(number + policy.monitoring.maturity_days.value)
        parts.append(taken.assign(row_id=number * 10**7 + taken["row_id"], day=_day(number), known=known))
    asked = pd.concat(parts, ignore_index=True).assign(version="2")
    settled = asked[(asked["utility"].notna() | (asked["excluded"].fillna("") != "")) & (asked["known"] <= today)]
    sources = {_day(number): (names[number - 1], _day(int(drawn[number - 1]))) for number in shown}
    health = asked.groupby("day").size()
    return MonitorRecords(
        model="flights", version="2", model_sha256="0" * 64, reference_version="1", reference_kind="baseline", since=FIRST, today=today,
        utility_unit=month.utility_unit, utility_scale=month.utility_scale, slices=month.slices,
        health=pd.DataFrame({"day": health.index, "requests": health.to_numpy(), "answered": health.to_numpy(), "latency_p95_ms": 1.0}),
        predictions=asked[list(PREDICTION_COLUMNS)], matured=settled[[*MATURED_COLUMNS, *month.slices]],
        inputs=tuple(_counts(bins, month.inputs, sources) for bins in month.columns),
        scores=(_counts(month.scores, month.score_counts, sources),),
    )  # fmt: skip


def load_december(settings: Settings, say: Say) -> December:
    """Train the candidate and score the month, or find both under the cache folder, each named by the code that makes it."""
    cache, trained = Path(settings.cache or settings.home / "cache"), code_digest("flights")
    key = digest([trained, code_digest(f"{SCORER}:score_month"), *map(_sha256, (drift.__file__, served.__file__)), _maturity_days()])
    folder = cache / f"december-{key[:20]}"
    if not (folder / "month.json").is_file():
        _make(folder, cache / f"candidate-{trained[:20]}", say)
    month = read_month(folder / "month.json")
    return December(month, {name: pd.read_parquet(folder / f"{name}.parquet") for name in month.inputs})


def _make(folder: Path, run: Path, say: Say) -> None:
    for each in (folder, run):
        each.mkdir(parents=True, exist_ok=True)
    weights = run / "model.safetensors"
    if not weights.is_file():
        say("training a flights candidate for the replay, once on this machine")
        ranks.run_group(TrainJob(recipe="flights", folder=str(run), world_size=1, warmup_steps=1))
    say("scoring December, clean and with every fault")
    ranks.call(f"{SCORER}:score_month", str(weights), str(folder), _maturity_days(), deadline_s=SCORE_DEADLINE_S)


def _maturity_days() -> int:
    return parse_policy().monitoring.maturity_days.value


def _sha256(path: str) -> str:
    return sha256_hex(Path(path).read_bytes())


def _counts(bins: Bins, by_name: Mapping[str, Counts], sources: Mapping[str, tuple[str, str]]) -> ColumnCounts:
    return counted(bins, {day: by_name[name][bins.name][source] for day, (name, source) in sources.items()})


def _day(number: int) -> str:
    """The ISO day of December's day `number`; 32 is January's first."""
    return (date.fromisoformat(FIRST) + timedelta(days=number - 1)).isoformat()

"""Records of a serving version that is as good as its fallback, small and seeded; each test names only what it changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from validation.drift import count_column
from validation.policy import parse_policy
from validation.served import MonitorRecords

MONITORING = parse_policy().monitoring
SINCE = "2013-12-01"
SCALE = 10.0  # standard deviation of the fallback's utility; the margin is a tenth of it
CARRIERS = ("AA", "UA")


def day(number: int) -> str:
    """The ISO day with this number, 1 = the first day of service."""
    return str(np.datetime64(SINCE) + np.timedelta64(number - 1, "D"))


def differences(days: int, *, mean: float = 0.0, spread: float = 0.3, seed: int = 0) -> list[float]:
    """Mean utility differences by day, in utility units, with a shock common to each day's rows."""
    return [float(value) for value in mean + np.random.default_rng(seed).normal(0.0, spread, days)]


def served(by_day: Sequence[float], *, rows: int = 200, carrier_drop: float = 0.0, seed: int = 0, **changes: Any) -> MonitorRecords:
    """One version's records: `rows` rows on each day with a mean difference, outcomes a day later, today the day after the last.

    `carrier_drop` makes the version so much worse on carrier UA, half of the rows. The last day has requests and no outcomes yet.
    """
    random, n = np.random.default_rng(seed), rows * (len(by_day) + 1)
    days = np.repeat([day(number) for number in range(1, len(by_day) + 2)], rows)
    known = np.repeat([day(number) for number in range(2, len(by_day) + 3)], rows)
    carrier = np.tile(CARRIERS, n)[:n]
    reference = random.normal(2.0, SCALE, n)
    noise = random.normal(0.0, 3.0, n)
    utility = reference + noise + np.repeat([*by_day, 0.0], rows) - carrier_drop * (carrier == "UA")
    scores = random.uniform(0.0, 1.0, n)
    today = day(len(by_day) + 1)
    common = {"row_id": np.arange(n), "version": "7"}
    predictions = pd.DataFrame({**common, "day": days, "score": scores, "reference_score": scores})
    matured = pd.DataFrame(
        {
            **common, "known": known, "excluded": "", "utility": utility, "reference_utility": reference, "loss": 0.4, "confidence": scores,
            "hit": (random.uniform(0.0, 1.0, n) < scores).astype(float), "carrier": carrier,
        }
    )  # fmt: skip
    health = pd.DataFrame({"day": np.unique(days), "requests": rows, "answered": rows, "latency_p95_ms": 5.0})
    training = pd.Series(random.uniform(0.0, 1.0, 5000))
    given: dict[str, Any] = {
        "model": "flights", "version": "7", "model_sha256": "ab" * 32, "reference_version": "6", "reference_kind": "last_known_good",
        "since": SINCE, "today": today, "utility_unit": "minutes", "utility_scale": SCALE, "slices": {"carrier": CARRIERS},
        "health": health, "predictions": predictions, "matured": matured[matured["known"] <= today],
        "inputs": (count_column("temp", training, pd.Series(scores), pd.Series(days)),),
        "scores": (count_column("score", training, pd.Series(scores), pd.Series(days)),),
    }  # fmt: skip
    return MonitorRecords(**{**given, **changes})

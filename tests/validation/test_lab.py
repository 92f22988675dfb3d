"""The chapter's numbers: diagnosis, lab table, and the question about doubling."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from validation.errors import ConfigError, EvidenceError
from validation.lab import (
    DIAGNOSIS_VERSION,
    MAX_WORKERS,
    LabRow,
    TrainingCost,
    lab_table,
    parse_workers,
    scaling_diagnosis,
    speedup,
    step_ms,
    worth,
)

CHAPTER: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "chapter.json").read_text())


def test_diagnosis_is_the_chapters() -> None:
    """420 and 1,390 samples/s at four workers are 82.7%; rank 3 is slow and the others wait 33, 31 and 32 ms."""
    found, printed = scaling_diagnosis(**CHAPTER["diagnosis"]["input"]), CHAPTER["diagnosis"]["printed"]

    assert CHAPTER["version"] == DIAGNOSIS_VERSION == found.version
    assert (printed["efficiency"], printed["ideal_sps"]) == (round(found.efficiency, 3), found.ideal_sps)
    assert (printed["slow_rank"], printed["idle_ms"]) == (found.slow_rank, list(found.idle_ms))
    assert scaling_diagnosis() == found


def test_lab_table_is_the_chapters() -> None:
    """All ten printed cells come out of 120 + 0.35 W + 5 log2 W."""
    expected = tuple(LabRow(**row) for row in CHAPTER["lab"])

    assert expected == lab_table()
    assert (pytest.approx(step_ms(1)), speedup(1)) == (120.35, 1.0)


@pytest.mark.parametrize("case", CHAPTER["doubling"], ids=lambda case: case["case"].replace(" ", "-"))
def test_doubling_question(case: dict[str, Any]) -> None:
    """Twice the throughput at twice the price halves the time at flat device-hours, unless steps or restarts grow."""
    found = worth(TrainingCost(**case["before"]), TrainingCost(**case["after"]))

    assert case["worth"] == pytest.approx({"wall_time": found.wall_time, "device_hours": found.device_hours, "cost": found.cost})


@pytest.mark.parametrize("text", ["1,2,4,8,16", " 1, 2 ,4,8,16 "], ids=["plain", "spaces"])
def test_parse_workers(text: str) -> None:
    """Counts are read in the order given."""
    assert parse_workers(text) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "a", "1.5", "1;2", "1_0", "²", "1,1", "9" * 9999, str(MAX_WORKERS + 1)])
def test_parse_workers_refuses(text: str) -> None:
    """Anything but distinct counts from 1 is refused with an example of what to write."""
    with pytest.raises(ConfigError, match="1,2,4,8,16"):
        parse_workers(text)


@pytest.mark.parametrize("workers", [0, -1, MAX_WORKERS + 1])
def test_step_ms_refuses(workers: int) -> None:
    """A worker count out of range has no estimate."""
    with pytest.raises(ConfigError, match=r"Give a list such as 1,2,4,8,16"):
        step_ms(workers)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"single_sps": math.nan}, "Run the scaling probe again", id="nan"),
        pytest.param({"distributed_sps": 0.0}, "Run the scaling probe again", id="zero"),
        pytest.param({"rank_step_ms": (118.0,)}, "one busy time for each rank", id="uneven"),
        pytest.param({"distributed_sps": 1681.0}, "Measure the single worker again", id="above-linear"),
        pytest.param({"workers": 1}, "Give the same number twice", id="two-baselines"),
    ],
)
def test_diagnosis_refuses(change: dict[str, Any], match: str) -> None:
    """Broken measurements are refused with the next step."""
    with pytest.raises(EvidenceError, match=match):
        scaling_diagnosis(**change)


def test_worth_refuses_nan() -> None:
    """A cost that was not measured has no worth."""
    way = TrainingCost(devices=4, throughput_sps=1.0, price_per_hour=math.nan, samples_to_target=1.0)

    with pytest.raises(EvidenceError, match="Measure it again"):
        worth(way, way)

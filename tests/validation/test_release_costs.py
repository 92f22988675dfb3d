"""The bill of a release: every part has an amount, a price with its source, or is called missing."""

import math
from dataclasses import replace
from typing import Any

import pytest

from validation.errors import EvidenceError
from validation.policy import Policy, parse_policy
from validation.release_costs import GIB, KINDS, CostPart, GateSpent, ReleaseCosts, Spent, capacity_usd, costs_table, release_costs

PRICES = """
scaling: {price_per_device_hour: {value: 2, source: "contract 7"}}
costs:
  storage_gib_month: {value: 0.5, source: "contract 8"}
  retention_days: {value: 61, source: "rule 9"}
  human_hour: {value: 100, source: "payroll"}
  review_hours_max: {value: 1, source: "clock"}
"""
WHOLE = Spent(
    devices=4, stored_bytes=2 * GIB, registry_bytes=GIB / 2, prepared_s=90.0,
    gates={"scaling": GateSpent(seconds=900.0, worker_seconds=1800.0)},
    training_s=450.0, training_worker_s=600.0, rest_s=45.0, queued_s=60.0, reviews=1, review_s=1800.0,
)  # fmt: skip


def policy() -> Policy:
    return parse_policy(PRICES)


def part(costs: ReleaseCosts, name: str) -> CostPart:
    """The line whose name begins so."""
    return next(item for item in costs.parts if item.name.startswith(name))


@pytest.mark.parametrize(
    ("name", "usd"),
    [
        pytest.param("evidence", 2 * 61 / 30.4375 * 0.5, id="storage"),
        pytest.param("data preparation", 90 / 3600 * 4 * 2, id="preparation"),
        pytest.param("scaling", 900 / 3600 * 4 * 2, id="gate"),
        pytest.param("training", 450 / 3600 * 4 * 2, id="training"),
        pytest.param("the rest", 45 / 3600 * 4 * 2, id="rest"),
        pytest.param("asked 1 times", 0.5 * 100, id="people"),
    ],
)
def test_a_part_is_its_amount_times_its_price(name: str, usd: float) -> None:
    """Amounts in the price's own unit, checked by hand."""
    assert part(release_costs(WHOLE, policy()), name).usd == pytest.approx(usd)


def test_the_sum_is_the_sum_of_its_parts_and_nothing_is_missing() -> None:
    """A release that was measured whole."""
    costs = release_costs(WHOLE, policy())

    assert costs.missing == ()
    assert costs.usd == pytest.approx(sum(item.usd or 0 for item in costs.parts))
    assert tuple(costs.by_kind()) == KINDS


@pytest.mark.parametrize("field", ["stored_bytes", "registry_bytes", "prepared_s", "training_s", "rest_s", "queued_s", "review_s"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0], ids=str)
def test_what_was_not_measured_is_missing_and_never_zero(field: str, value: float | None) -> None:
    """None, NaN, infinity and less than nothing: no amount, no USD, and it is named."""
    changed: dict[str, Any] = {field: value}
    costs = release_costs(replace(WHOLE, **changed), policy())
    gone = [item for item in costs.parts if item.is_missing]

    assert [(item.amount, item.usd) for item in gone] == [(None, None)]
    assert costs.missing == (f"{gone[0].kind}: {gone[0].name}",)
    assert "missing" in [row[2] for row in costs_table(costs).rows]


def test_a_release_without_evidence_has_a_bill_of_missing_parts() -> None:
    """Not even the number of devices is known: compute is missing, not free."""
    costs = release_costs(Spent(devices=None), policy())

    assert costs.usd == 0
    assert len(costs.missing) == len(costs.parts) - 1  # nobody was asked, and that is known
    assert costs.by_kind()["compute"] is None


def test_queueing_has_an_amount_but_no_price() -> None:
    """A wait is known in seconds; it is not called missing."""
    queue = part(release_costs(WHOLE, policy()), "scheduled")

    assert (queue.amount, queue.usd, queue.is_missing) == (60.0, None, False)
    assert "no price" in queue.note


@pytest.mark.parametrize(("waited_h", "paid_h"), [(0.25, 0.25), (1.0, 1.0), (60.0, 1.0)])
def test_a_weekends_wait_for_a_person_is_no_weekends_work(waited_h: float, paid_h: float) -> None:
    """Up to the policy's hours it counts as work; beyond it is waiting."""
    costs = release_costs(replace(WHOLE, review_s=waited_h * 3600), policy())

    assert part(costs, "asked").usd == pytest.approx(paid_h * 100)


def test_nobody_asked_is_a_known_zero() -> None:
    """A policy without approval costs no person's time."""
    costs = release_costs(replace(WHOLE, reviews=0, review_s=None), policy())

    assert (part(costs, "nobody").usd, costs.missing) == (0.0, ())


def test_every_price_names_its_source() -> None:
    """A reader can ask who said so."""
    notes = {item.kind: item.note for item in release_costs(WHOLE, policy()).parts}

    for kind, source in (("storage", "contract 8"), ("storage", "rule 9"), ("compute", "contract 7"), ("human review", "payroll")):
        assert source in notes[kind]


def test_attempts_are_all_paid_and_named() -> None:
    """A gate that passed on its second attempt cost both."""
    gates = {"scaling": GateSpent(seconds=1000.0, worker_seconds=None, attempts=2)}
    line = part(release_costs(replace(WHOLE, gates=gates), policy()), "scaling")

    assert (line.name, line.worker_s) == ("scaling, 2 attempts", None)


def test_devices_that_are_always_there_are_shared_by_the_weeks_releases() -> None:
    """Two places of four devices, ten releases a week."""
    assert capacity_usd(policy(), machine_devices=4, places=2, per_week=10) == pytest.approx(4 * 2 * 168 * 2 / 10)


@pytest.mark.parametrize("given", [{"machine_devices": 0}, {"places": 0}, {"per_week": 0.0}, {"per_week": math.nan}])
def test_capacity_of_nothing_is_refused(given: dict[str, Any]) -> None:
    """No devices, no places, no releases."""
    with pytest.raises(EvidenceError, match="above zero"):
        capacity_usd(policy(), **{"machine_devices": 4, "places": 1, "per_week": 1.0, **given})

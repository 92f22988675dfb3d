"""What one release cost: storage, preparation, compute, queueing, people. What was not measured is said to be missing, never zero."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from validation.errors import EvidenceError
from validation.policy import Policy, Threshold
from validation.verdict import Table

DAYS_A_MONTH = 30.4375
HOUR_S = 3600.0
WEEK_HOURS = 168.0
GIB = 2**30
KINDS = ("storage", "preprocessing", "compute", "queueing", "human review")
NO_PRICE = "no price: it costs days, not money; what idle devices cost stands in the table by devices"
COLUMNS = ("cost", "what", "amount", "unit", "worker-s", "USD", "how it was measured, and at what price")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpent:
    """What all attempts of a gate took."""

    seconds: float | None  # wall clock; the gate held every device of the machine
    worker_seconds: float | None  # ranks x seconds they existed
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was measured of one release. None = it was not measured."""

    devices: int | None  # of the machine; a release holds them all
    stored_bytes: float | None = None  # evidence, its tables, the journal
    registry_bytes: float | None = None  # model files, report, plots
    prepared_s: float | None = None  # reading and preparing data before the release began
    gates: Mapping[str, GateSpent] = field(default_factory=dict)
    training_s: float | None = None  # wall clock of training and registering the candidate
    training_worker_s: float | None = None
    rest_s: float | None = None  # of the run: neither gate nor training
    queued_s: float | None = None  # scheduled until running
    reviews: int = 0  # times that a person was asked
    review_s: float | None = None  # asked until answered, all together; counts only if somebody was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPart:
    """One line of the bill."""

    kind: str  # one of KINDS
    name: str
    amount: float | None  # None: not measured
    unit: str
    usd: float | None  # None: not measured, or without a price
    note: str
    worker_s: float | None = None  # of compute: ranks x seconds they existed

    @property
    def is_missing(self) -> bool:
        """Whether it was not measured: the sum is too small by it."""
        return self.amount is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCosts:
    """The bill of one release."""

    parts: tuple[CostPart, ...]

    @property
    def usd(self) -> float:
        """Sum of what has a price and was measured."""
        return sum(part.usd for part in self.parts if part.usd is not None)

    @property
    def missing(self) -> tuple[str, ...]:
        """What the sum lacks."""
        return tuple(f"{part.kind}: {part.name}" for part in self.parts if part.is_missing)

    def by_kind(self) -> dict[str, float | None]:
        """USD a kind; None where nothing of the kind was measured or has a price."""
        priced = {kind: [part.usd for part in self.parts if part.kind == kind and part.usd is not None] for kind in KINDS}
        return {kind: sum(usd) if usd else None for kind, usd in priced.items()}


def release_costs(spent: Spent, policy: Policy) -> ReleaseCosts:
    """Price what was measured; every note names the price and its source."""
    return ReleaseCosts(
        parts=(*_storage(spent, policy), _preparation(spent, policy), *_compute(spent, policy), _queue(spent), _human(spent, policy))
    )


def capacity_usd(policy: Policy, *, machine_devices: int, places: int, per_week: float) -> float:
    """What devices that are there all week cost a release, whether they work or wait."""
    if machine_devices < 1 or places < 1 or not per_week > 0:
        raise EvidenceError(
            f"{places} places of {machine_devices} devices at {per_week} releases a week have no cost a release. Give numbers above zero."
        )
    return machine_devices * places * WEEK_HOURS * policy.scaling.price_per_device_hour.value / per_week


def costs_table(costs: ReleaseCosts) -> Table:
    """The bill as rows; "missing" where nothing was measured."""
    rows = [
        (
            part.kind, part.name, "missing" if part.amount is None else part.amount, part.unit, part.worker_s,
            "missing" if part.is_missing else "no price" if part.usd is None else part.usd, part.note,
        )
        for part in costs.parts
    ]  # fmt: skip
    return Table(title="What the release cost", columns=COLUMNS, rows=tuple(rows))


def _storage(spent: Spent, policy: Policy) -> list[CostPart]:
    price, days = policy.costs.storage_gib_month, policy.costs.retention_days
    months = days.value / DAYS_A_MONTH
    note = f"kept {days.value} days ({days.source}) at {_priced(price, 'GiB-month')}"
    named = {"evidence, tables and journal": spent.stored_bytes, "model files, report and plots": spent.registry_bytes}
    return [_part("storage", name, _per(size, GIB / months), "GiB-month", price.value, note) for name, size in named.items()]


def _preparation(spent: Spent, policy: Policy) -> CostPart:
    price = policy.scaling.price_per_device_hour
    held = _held(spent.prepared_s, spent.devices)
    return _part(
        "preprocessing", "data preparation", held, "device-h", price.value, f"the machine is held; {_priced(price, 'device-hour')}"
    )


def _compute(spent: Spent, policy: Policy) -> list[CostPart]:
    price = policy.scaling.price_per_device_hour
    held: list[tuple[str, float | None, float | None, str]] = [
        (name if gate.attempts == 1 else f"{name}, {gate.attempts} attempts", gate.seconds, gate.worker_seconds, "every device is held")
        for name, gate in spent.gates.items()
    ] or [("gates", None, None, "no gate left evidence")]
    held.append(("training and registering the candidate", spent.training_s, spent.training_worker_s, "every device is held"))
    held.append(("the rest of the run", spent.rest_s, None, "neither gate nor training"))
    return [
        _part("compute", name, _held(seconds, spent.devices), "device-h", price.value, f"{why}; {_priced(price, 'device-hour')}", worker_s)
        for name, seconds, worker_s, why in held
    ]


def _queue(spent: Spent) -> CostPart:
    queued = _known(spent.queued_s)
    note = NO_PRICE if queued is not None else "the journal does not say when it was scheduled"
    return CostPart(kind="queueing", name="scheduled until running", amount=queued, unit="s", usd=None, note=note)


def _human(spent: Spent, policy: Policy) -> CostPart:
    price, most = policy.costs.human_hour, policy.costs.review_hours_max
    if not spent.reviews:
        return CostPart(kind="human review", name="nobody was asked", amount=0.0, unit="s", usd=0.0, note="the policy asks for no approval")
    waited = _known(spent.review_s)
    usd = None if waited is None else min(waited / HOUR_S, most.value * spent.reviews) * price.value
    note = f"at most {most.value:g} h each counts as work ({most.source}); {_priced(price, 'hour')}"
    return CostPart(kind="human review", name=f"asked {spent.reviews} times until answered", amount=waited, unit="s", usd=usd, note=note)


def _part(kind: str, name: str, amount: float | None, unit: str, price: float, note: str, worker_s: float | None = None) -> CostPart:
    known = _known(amount)
    usd = None if known is None else known * price
    return CostPart(kind=kind, name=name, amount=known, unit=unit, usd=usd, note=note, worker_s=_known(worker_s))


def _known(amount: float | None) -> float | None:
    """NaN, infinity and less than nothing are no measurements."""
    return amount if amount is not None and math.isfinite(amount) and amount >= 0 else None


def _per(amount: float | None, unit: float) -> float | None:
    return None if amount is None else amount / unit


def _held(seconds: float | None, devices: int | None) -> float | None:
    """Device-hours of a machine whose every device is held."""
    return None if seconds is None or not devices else seconds * devices / HOUR_S


def _priced(price: Threshold[float], unit: str) -> str:
    return f"{price.value:g} USD a {unit} ({price.source})"

"""`seatrial cost`: the bill of one release, and what releases wait for and cost at other rates and with more devices.

Measured from the journal and the evidence of past releases; the rates are replayed through a queue (docs/costs.md). Writes a page with
pictures under <home>/costs/<release_id>; changes nothing else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.cost_records import Story, find_story, like, service_times, spent_by
from infra.journal import list_releases
from infra.registry_sizes import registry_bytes
from infra.settings import Settings
from infra.store import ObjectStore, open_store
from infra.wording import duration
from validation.arrivals import PATTERNS, RERUN_SHARE, Demand, Pattern
from validation.canonical import plain
from validation.errors import ConfigError, StoreError
from validation.policy import Policy, parse_policy
from validation.queueing import ServiceTimes, Waiting, check_measured, waiting, weeks_for
from validation.release_costs import COLUMNS, ReleaseCosts, capacity_usd, costs_table, release_costs
from validation.verdict import Plot, Series

SEEDS = 10  # replays of each demand
RECORDED_MIN = 20  # releases in the store from which on their own times are replayed too
RATE_MAX, PLACES_MAX, VALUES_MAX = 1000.0, 64, 12
WAIT_SHOWN_S = 1.0  # a shorter wait is none
GRID = ("pattern", "a week", "machines", "load", "wait p50", "wait p95", "95% interval", "re-run p95", "USD by use", "USD reserved")
WORDS = {"steady": "any hour", "office": "office hours", "nightly": "nightly, re-runs by day", "recorded": "as recorded"}

Say = Callable[[str], object]


def cost(settings: Settings, *, say: Say, release_id: str, per_week: str, devices: str, seed: int) -> dict[str, Any]:
    """Cost a release and replay its like at other rates. Raises: ConfigError for values that cannot work or a store without releases."""
    rates = _numbers(per_week, "--per-week", RATE_MAX, whole=False)
    places = [int(value) for value in _numbers(devices, "--devices", PLACES_MAX, whole=True)]
    store = open_store(settings, writable=False)
    story = find_story(store, release_id)
    policy = parse_policy(story.started["request"].get("policy_text") or None, name=f"the policy of {story.release_id}")
    size, problem = _registry_bytes(settings, story)
    spent = spent_by(store, story, size)
    costs = release_costs(spent, policy)
    stories = like(store, story)
    service = service_times(stories)
    check_measured(service)
    say(f"{story.release_id}: {len(stories)} measured releases of {story.model}; replaying {len(rates) * len(places)} cases a pattern")
    rows = [
        _row(found, costs, policy, spent.devices)
        for demand in _demands(store, rates, policy.costs.models.value)
        for found in (waiting(demand, service, places=count, seeds=range(seed, seed + SEEDS)) for count in places)
    ]
    document: dict[str, Any] = {
        "ok": True, "release_id": story.release_id, "model": story.model, "measured_releases": [item.release_id for item in stories],
        "usd": costs.usd, "usd_by_kind": costs.by_kind(), "missing": list(costs.missing), "parts": plain(costs.parts), "seed": seed,
        "replays": SEEDS, "grid": rows, "assumptions": _assumptions(policy, service, problem),
    }  # fmt: skip
    folder = _write(settings.home / "costs" / story.release_id, document, costs)
    return document | {"page": str(folder / "cost.md"), "pictures": sorted(str(path) for path in folder.glob("*.png"))}


def lines(document: Mapping[str, Any]) -> list[str]:
    """The bill, the cases in which one in twenty waits, and what they rest on."""
    grid = document["grid"]
    waits = [row for row in grid if not row["wait_p95_s"]["value"] < WAIT_SHOWN_S or not row["is_stable"]]
    return [
        f"release {document['release_id']} of {document['model']}: {document['usd']:.4g} USD",
        *_bill(document),
        *([f"missing, so in no sum: {', '.join(document['missing'])}"] if document["missing"] else []),
        "",
        *(_aligned([GRID, *map(_shown, waits)]) if waits else []),
        f"in {len(grid) - len(waits)} of {len(grid)} cases 19 of 20 releases start at once; the page has them all",
        "",
        *document["assumptions"],
        f"page and pictures: {document['page']}",
    ]


def _row(found: Waiting, costs: ReleaseCosts, policy: Policy, machine_devices: int | None) -> dict[str, Any]:
    """One case of the grid. Reserved: devices are paid all week; storage and people are paid as before."""
    by_kind = costs.by_kind()
    others = sum(by_kind[kind] or 0.0 for kind in ("storage", "human review"))
    held = None
    if machine_devices:
        held = others + capacity_usd(policy, machine_devices=machine_devices, places=found.places, per_week=found.demand.per_week)
    estimates = {
        f"wait_{name}_s": {"value": item.value, "low": item.low, "high": item.high}
        for name, item in (("p50", found.wait_p50_s), ("p95", found.wait_p95_s))
    }
    return {
        "pattern": found.demand.pattern, "per_week": found.demand.per_week, "devices": found.places, "releases": found.releases,
        "load": found.load, "is_stable": found.is_stable, **estimates, "rerun_wait_p95_s": found.rerun_wait_p95_s, "run_s": found.run_s,
        "human_s": found.human_s, "usd_by_use": costs.usd, "usd_reserved": held,
    }  # fmt: skip


def _demands(store: ObjectStore, rates: Sequence[float], models: int) -> list[Demand]:
    """Every pattern at every rate; the recorded one if the store holds enough releases."""
    recorded = tuple(_asked_at(release_id) for release_id in list_releases(store))
    patterns: list[Pattern] = [*PATTERNS]
    if len(recorded) >= RECORDED_MIN and recorded[-1] > recorded[0]:
        patterns.append("recorded")
    return [
        Demand(pattern=pattern, per_week=rate, weeks=weeks_for(rate), models=models, recorded_s=recorded)
        for pattern in patterns
        for rate in rates
    ]


def _asked_at(release_id: str) -> float:
    """The time in a release's id, seconds since 1970."""
    _, day, time, _ = release_id.rsplit("-", 3)
    return datetime.strptime(day + time, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def _registry_bytes(settings: Settings, story: Story) -> tuple[float | None, str]:
    """Bytes in the registry, or None and why they are not known."""
    candidate = story.candidate
    if candidate is None or not candidate.get("run_id") or not candidate.get("version"):
        return None, "the release has no version in the registry"
    try:
        return float(registry_bytes(settings, model=story.model, version=str(candidate["version"]), run_id=str(candidate["run_id"]))), ""
    except StoreError as error:
        return None, str(error)


def _assumptions(policy: Policy, service: ServiceTimes, problem: str) -> list[str]:
    """What the numbers rest on, in sentences."""
    models = policy.costs.models
    drawn = max(len(seconds) for seconds in service.gates.values())
    return [
        f"machines (--devices): like the measured one; a release holds one of them whole. {models.value} models ({models.source}).",
        f"times: drawn from what {drawn} releases measured, part by part. Intervals: 95%, over {SEEDS} replays; they cover no assumption.",
        f"nightly: all at 02:00, and by hand one gate of {RERUN_SHARE:.0%} of them again in office hours; re-runs go first.",
        "load from 1 on: more work than the machines can do, so waits grow for as long as one simulates.",
        "USD by use: machines are paid while they work. USD reserved: all week, shared by the week's releases.",
        *([f"registry: not counted: {problem}"] if problem else []),
    ]


def _write(folder: Path, document: Mapping[str, Any], costs: ReleaseCosts) -> Path:
    """The page with its pictures; a second run writes over the first."""
    from infra.plots import plot_png  # a second of import that bad input does not pay

    folder.mkdir(parents=True, exist_ok=True)
    pictures = {f"waiting-{name}.png": plot for name, plot in _waiting_plots(document).items()}
    pictures["cost.png"] = _cost_plot(document)
    for name, plot in pictures.items():
        (folder / name).write_bytes(plot_png(plot))
    table = costs_table(costs)
    text = [
        f"# What release {document['release_id']} cost", "", f"{document['usd']:.4g} USD for what was measured and has a price.", "",
        *_markdown([COLUMNS, *(tuple(map(_cell, row)) for row in table.rows)]), "", "# Waiting and cost by rate and devices", "",
        *_markdown([GRID, *map(_shown, document["grid"])]), "", *(f"- {line}" for line in document["assumptions"]), "",
        *(f"![{name}]({name})" for name in pictures),
    ]  # fmt: skip
    (folder / "cost.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return folder


def _waiting_plots(document: Mapping[str, Any]) -> dict[str, Plot]:
    """p95 of the wait by rate, a line for each number of devices, a picture a pattern."""
    grid = document["grid"]
    return {
        pattern: Plot(
            title=f"Wait for a machine, {WORDS[pattern]}: 95th percentile", kind="line", x_label="releases a week", y_label="minutes",
            series=tuple(_waits([row for row in grid if row["pattern"] == pattern], devices) for devices in _devices(grid)),
        )
        for pattern in dict.fromkeys(row["pattern"] for row in grid)
    }  # fmt: skip


def _waits(rows: Sequence[Mapping[str, Any]], devices: int) -> Series:
    mine = [row for row in rows if row["devices"] == devices]
    low, value, high = (tuple(row["wait_p95_s"][end] / 60 for row in mine) for end in ("low", "value", "high"))
    return Series(name=_places(devices), x=tuple(row["per_week"] for row in mine), y=value, low=low, high=high)


def _cost_plot(document: Mapping[str, Any]) -> Plot:
    """What a release costs when devices are reserved: the same for every pattern."""
    grid = [row for row in document["grid"] if row["pattern"] == document["grid"][0]["pattern"]]
    by_devices = {devices: [row for row in grid if row["devices"] == devices] for devices in _devices(grid)}
    return Plot(
        title="Cost of a release, machines reserved", kind="line", x_label="releases a week", y_label="USD a release", y_log=True,
        series=tuple(
            Series(
                name=_places(devices), x=tuple(row["per_week"] for row in rows),
                y=tuple(math.nan if row["usd_reserved"] is None else row["usd_reserved"] for row in rows),
            )
            for devices, rows in by_devices.items()
        ),
        reference=document["usd"] or None, reference_label="paid by use",
    )  # fmt: skip


def _devices(grid: Sequence[Mapping[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["devices"] for row in grid))


def _places(devices: int) -> str:
    return f"{devices} machine{'s' if devices > 1 else ''}"


def _bill(document: Mapping[str, Any]) -> list[str]:
    rows = [
        (part["kind"], part["name"], _cell(part["amount"] if part["amount"] is not None else "missing"), part["unit"], _usd(part))
        for part in document["parts"]
    ]
    return _aligned([("cost", "what", "amount", "unit", "USD"), *rows])


def _usd(part: Mapping[str, Any]) -> str:
    return "missing" if part["amount"] is None else "no price" if part["usd"] is None else f"{part['usd']:.3g}"


def _shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A case of the grid in words."""
    p95, rerun, held = row["wait_p95_s"], row["rerun_wait_p95_s"], row["usd_reserved"]
    return (
        WORDS[row["pattern"]], f"{row['per_week']:g}", str(row["devices"]), f"{row['load']:.2g}{'' if row['is_stable'] else ' (too much)'}",
        duration(row["wait_p50_s"]["value"]), duration(p95["value"]), f"{duration(p95['low'])} to {duration(p95['high'])}",
        "none" if rerun is None else duration(rerun), f"{row['usd_by_use']:.3g}", "missing" if held is None else f"{held:.3g}",
    )  # fmt: skip


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def _numbers(text: str, option: str, most: float, *, whole: bool) -> list[float]:
    """Different positive numbers, rising. Raises ConfigError saying how to write them."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    fits = 0 < len(values) <= VALUES_MAX and all(0 < value <= most and (not whole or value.is_integer()) for value in values)
    if not fits:
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(
            f"{option} '{text}' are not {kind} above 0 and up to {most:g}, {VALUES_MAX} at most. Nothing was computed. "
            "Write them like 1,2,4."
        )
    return values

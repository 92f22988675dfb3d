"""A release's journal and evidence, read back as measurements: what it took, what it keeps, who waited. Nothing is made up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra.journal import Entry, Journal, list_releases
from infra.store import ObjectStore, get_blob, get_evidence
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError
from validation.queueing import REST, ServiceTimes
from validation.release_costs import GateSpent, Spent

TRAINING = "training"
MEASURED = 20  # latest releases whose times are drawn from: older ones ran other code
LOOKED_AT = 200  # releases that are read to find those, newest first
_ENDS = ("decided", "abandoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A verified journal and the documents of its gates."""

    release_id: str
    entries: tuple[Entry, ...]
    gates: tuple[tuple[Entry, Mapping[str, Any]], ...]  # each gate record with its evidence

    @property
    def started(self) -> Mapping[str, Any]:
        """What the release was asked for, and where."""
        return self.entries[0].payload

    @property
    def model(self) -> str:
        """Name of the registered model."""
        return str(self.started["model"])

    @property
    def candidate(self) -> Mapping[str, Any] | None:
        """The latest trained model, as the journal has it."""
        return next((entry.payload for entry in reversed(self.entries) if entry.kind == "candidate"), None)

    @property
    def first_run(self) -> tuple[Entry, ...]:
        """Records up to the first end: re-runs of gates come after it."""
        ends = [place for place, entry in enumerate(self.entries) if entry.kind in _ENDS]
        return self.entries[: ends[0] + 1] if ends else self.entries


def find_story(store: ObjectStore, release_id: str) -> Story:
    """A release by its id, or the latest decided one. Raises: ConfigError when there is none."""
    if release_id:
        story = read_story(store, release_id)
        if story is None:
            raise ConfigError(f"there is no release '{release_id}' in this store, so nothing can be costed. `seatrial show` lists them.")
        return story
    for at in list(reversed(list_releases(store)))[:LOOKED_AT]:
        found = _readable(store, at)
        if found is not None and _is_decided(found):
            return found
    raise ConfigError("no decided release stands in this store, so nothing was measured. Run `seatrial release flights` first.")


def read_story(store: ObjectStore, release_id: str) -> Story | None:
    """Journal and gate evidence, verified; None when nothing was written. Raises EvidenceError when something was altered."""
    entries = Journal(store, release_id).records()
    if not entries:
        return None
    gates = tuple((entry, get_evidence(store, entry.payload["evidence"])) for entry in entries if entry.kind == "gate")
    return Story(release_id=release_id, entries=entries, gates=gates)


def like(store: ObjectStore, story: Story) -> tuple[Story, ...]:
    """The latest decided releases of the same model on the same machine, this one first: what service times are drawn from."""
    found = [story]
    for at in list(reversed(list_releases(store, story.model)))[:LOOKED_AT]:
        other = None if at == story.release_id or len(found) == MEASURED else _readable(store, at)
        if other is not None and _is_decided(other) and other.started.get("machine") == story.started.get("machine"):
            found.append(other)
    return tuple(found)


def spent_by(store: ObjectStore, story: Story, registry_bytes: float | None) -> Spent:
    """What one release took and keeps, every attempt counted."""
    asked, waited = _reviews(story)
    machine = story.started.get("machine") or {}
    return Spent(
        devices=machine.get("devices"), stored_bytes=_stored_bytes(store, story), registry_bytes=registry_bytes,
        prepared_s=_number(story.started.get("prepared_s")), gates=_gates(story), training_s=training_s(story),
        training_worker_s=_training_worker_s(story), rest_s=rest_s(story), queued_s=queued_s(story), reviews=asked, review_s=waited,
    )  # fmt: skip


def service_times(stories: Sequence[Story]) -> ServiceTimes:
    """Seconds of each part in every measured release; a gate that was not held took none and is not drawn."""
    gates: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    human: list[float] = []
    for story in stories:
        first = len(story.first_run)
        for entry, document in story.gates:
            if entry.sequence <= first and document.get("records") is not None:
                gates.setdefault(entry.payload["gate"], []).append(float(document["seconds"]))
        for name, seconds in ((TRAINING, training_s(story)), (REST, rest_s(story))):
            if seconds is not None:
                others.setdefault(name, []).append(seconds)
        human += [seconds for seconds in _answers(story.entries) if seconds is not None]
    return ServiceTimes(
        gates={name: tuple(seconds) for name, seconds in gates.items()}, others={name: tuple(seconds) for name, seconds in others.items()},
        human_s=tuple(human),
    )  # fmt: skip


def training_s(story: Story) -> float | None:
    """Last gate before the candidate until the candidate: training and registering. None when none was trained."""
    records = story.first_run
    at = next((place for place, entry in enumerate(records) if entry.kind == "candidate"), None)
    before = [entry for entry in records[:at] if entry.kind == "gate"]
    return None if at is None or not before else between(before[-1].time_utc, records[at].time_utc)


def rest_s(story: Story) -> float | None:
    """Of the first run, what was neither gate nor training nor a person; None when it has no end. Times are whole seconds."""
    records = story.first_run
    if records[-1].kind not in _ENDS:
        return None
    gates = sum(float(document["seconds"]) for entry, document in story.gates if entry.sequence <= len(records))
    people = sum(seconds for seconds in _answers(records) if seconds is not None)
    run = between(str(story.started.get("running_at") or records[0].time_utc), records[-1].time_utc)
    return max(0.0, run - gates - (training_s(story) or 0.0) - people)


def queued_s(story: Story) -> float | None:
    """Scheduled until running; None when the journal does not say. What gates waited for devices comes on top."""
    scheduled, running = story.started.get("scheduled_at"), story.started.get("running_at")
    if not scheduled or not running:
        return None
    return max(0.0, between(str(scheduled), str(running))) + sum(float(document.get("queued_s", 0.0)) for _, document in story.gates)


def asked_at(story: Story) -> float:
    """When the release was asked for, seconds since 1970."""
    return datetime.fromisoformat(str(story.started.get("scheduled_at") or story.entries[0].time_utc)).timestamp()


def between(earlier: str, later: str) -> float:
    """Seconds from one time of a record to another."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def _gates(story: Story) -> dict[str, GateSpent]:
    spent: dict[str, GateSpent] = {}
    for entry, document in story.gates:
        name, before = entry.payload["gate"], spent.get(entry.payload["gate"])
        seconds, workers = float(document["seconds"]), float(document["worker_seconds"])
        spent[name] = GateSpent(
            seconds=seconds + (before.seconds or 0.0 if before else 0.0),
            worker_seconds=workers + (before.worker_seconds or 0.0 if before else 0.0),
            attempts=1 + (before.attempts if before else 0),
        )
    return spent


def _training_worker_s(story: Story) -> float | None:
    """Every candidate that was trained; one that was used again is written down again, with the same weights."""
    trained = {entry.payload["weights_sha256"]: entry.payload["worker_seconds"] for entry in story.entries if entry.kind == "candidate"}
    return sum(map(float, trained.values())) if trained else None


def _reviews(story: Story) -> tuple[int, float | None]:
    """How often a person was asked, and how long all answers took; None while one is open."""
    answers = _answers(story.entries)
    told = [entry.kind for entry in story.entries if entry.kind in ("approval_requested", "approval")]
    is_open = bool(told) and told[-1] == "approval_requested"
    known = [seconds for seconds in answers if seconds is not None]
    return len(answers) + is_open, None if is_open or len(known) < len(answers) else sum(known)


def _answers(entries: Sequence[Entry]) -> list[float | None]:
    """Seconds that each answer took. `decided` repeats the last one (null without a person), so only the answers themselves count."""
    return [_number(entry.payload.get("human_review_s")) for entry in entries if entry.kind == "approval"]


def _stored_bytes(store: ObjectStore, story: Story) -> float:
    """The journal twice (record and readable copy), the gates' evidence and the tables that it names."""
    journal = sum(2 * len(canonical_json(entry.payload)) for entry in story.entries)
    digests: dict[str, None] = {}
    for entry in story.entries:
        digests |= dict.fromkeys(str(entry.payload[key]) for key in ("evidence", "attestation") if entry.payload.get(key))
    for _, document in story.gates:
        digests |= dict.fromkeys(_tables(document.get("records")))
    return float(journal + sum(len(get_blob(store, sha256)) for sha256 in digests))


def _tables(value: Any) -> list[str]:
    """sha256 of every table that a gate's records name."""
    if isinstance(value, Mapping):
        own = [str(value["parquet_sha256"])] if "parquet_sha256" in value else []
        return own + [found for item in value.values() for found in _tables(item)]
    return [found for item in value for found in _tables(item)] if isinstance(value, list) else []


def _is_decided(story: Story) -> bool:
    return any(entry.kind == "decided" for entry in story.entries)


def _readable(store: ObjectStore, release_id: str) -> Story | None:
    """A release that cannot be verified measures nothing; `seatrial show` names it."""
    try:
        return read_story(store, release_id)
    except EvidenceError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

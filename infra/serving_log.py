"""What versions in service were asked and answered, in the store: write-once, day by day, each row with the exact version that scored it.

    serving/<model>/days/<day>/0001                 what was scored in one go: who, when, how many, and the sha256 of the table
    serving/<model>/reference/<version>-<fallback>  what a version's inputs and scores looked like where it was made, and the scale
    serving/<model>/verdicts/<day>/0001             the sha256 of a monitor's signed verdict
    evidence/sha256/<digest>                        tables (Parquet) and verdicts themselves, by content

A number is taken by writing it, so two processes that score one day at once cannot both hold it: the loser reads what the winner
scored, and finds those requests answered.
"""

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

import pandas as pd

from infra.store import NotFoundError, ObjectStore, get_blob, put_blob
from validation.canonical import canonical_json
from validation.errors import ConfigError, ConflictError, EvidenceError

# One row a request. score: of the event, or the largest of the classes'; NaN where `answered` is False. Scores of C classes also stand
# in score_0 ... score_C-1; the same for the reference. latency_ms: of a call for this row alone, NaN where it was not timed.
PART_COLUMNS = ("row_id", "made_at", "version", "model_sha256", "score", "reference_version", "reference_score", "latency_ms", "answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Requests of one day that were scored in one go by one version, and by its fallback beside it."""

    model: str
    day: str  # ISO, of the requests' event time
    version: str
    kind: Literal["candidate", "last_known_good", "baseline"]  # in what role it served
    model_sha256: str  # of its files, as the signed statement that admitted it has them
    reference_version: str  # the fallback; "" = there is none
    reference_kind: str  # "last_known_good" | "baseline" | ""
    reference_sha256: str
    recipe: str  # import path
    release_id: str  # whose decision let the version serve
    made_at: str  # when it was scored, ISO 8601 UTC
    rows: int  # requests
    answered: int
    failure: str  # why nothing was answered at all, in words; "" = the version answered
    reference_failure: str
    counts: Mapping[str, Mapping[str, Any]]  # column, or "" for the scores -> {"rows": a bin, "missing": rows without a value}
    number: int  # of the day, 1, 2, ...
    table: str = ""  # sha256 of the Parquet table, PART_COLUMNS


class ServingLog:
    """One model's log. Everything is read back verified: a table by its sha256, a part by its fields."""

    def __init__(self, store: ObjectStore, model: str) -> None:
        self._store = store
        self._root = f"serving/{model}"
        self.model = model

    def add(self, part: Part, table: pd.DataFrame) -> Part:
        """Keep a part and its table under the part's number; returns it with the table's sha256.

        Raises: ConflictError when another process has taken this number, and so scored requests of this day.
        """
        if lacking := sorted(set(PART_COLUMNS) - set(table.columns)):
            raise ValueError(f"the table of a part has no {', '.join(lacking)}")
        made = replace(part, table=put_blob(self._store, parquet_bytes(table)))
        self._store.put_new(self._day_key(part.day, part.number), canonical_json(made))
        return made

    def days(self, *, until: str = "") -> tuple[str, ...]:
        """Days of which something was scored, in order; not later than `until`, if given."""
        names = {key.split("/")[3] for key in self._store.list(f"{self._root}/days/")}
        return tuple(sorted(day for day in names if not until or day <= until))

    def parts(self, day: str) -> tuple[Part, ...]:
        """Everything that was scored of a day, in order. Raises EvidenceError when a record is missing or is none."""
        keys = self._store.list(f"{self._root}/days/{checked_day(day)}/")
        if keys != (wanted := [self._day_key(day, number) for number in range(1, len(keys) + 1)]):
            raise self._broken(next((key for key in wanted if key not in keys), keys[-1]), "it is missing, or a foreign one stands there")
        return tuple(self._part(key, day, number) for number, key in enumerate(keys, start=1))

    def table(self, part: Part) -> pd.DataFrame:
        """A part's rows, their bytes verified. Raises EvidenceError when they were altered or are not this part's."""
        found = parquet_frame(get_blob(self._store, part.table), f"the predictions of {part.day}")
        versions = set(found["version"]) if "version" in found else set()
        if len(found) != part.rows or not versions <= {part.version}:
            raise self._broken(self._day_key(part.day, part.number), f"its table has {len(found)} rows of version {sorted(versions)}")
        return found

    def reference(self, version: str, fallback: str) -> Mapping[str, Any] | None:
        """What was kept of a version where it was made; None before its first prediction."""
        try:
            return self._document(self._reference_key(version, fallback))
        except NotFoundError:
            return None

    def add_reference(self, version: str, fallback: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep it once; returns the one that stands (an earlier one wins)."""
        key = self._reference_key(version, fallback)
        with suppress(ConflictError):  # made a moment earlier by another process, from the same splits
            self._store.put_new(key, canonical_json({**document, "version": version, "fallback": fallback}))
        return self._document(key)

    def add_verdict(self, day: str, attestation: str) -> None:
        """Write down that a monitor judged, and where its signed verdict stands; the same one again changes nothing."""
        while attestation not in (known := self.verdicts(day)):
            try:
                self._store.put_new(f"{self._root}/verdicts/{day}/{len(known) + 1:04d}", canonical_json({"attestation": attestation}))
            except ConflictError:
                continue  # another monitor took the number

    def verdicts(self, day: str) -> tuple[str, ...]:
        """Signed verdicts of a day, in order."""
        keys = self._store.list(f"{self._root}/verdicts/{checked_day(day)}/")
        return tuple(str(self._document(key).get("attestation", "")) for key in keys)

    def _part(self, key: str, day: str, number: int) -> Part:
        try:
            part = Part(**self._document(key))
        except TypeError as error:
            raise self._broken(key, str(error)) from None
        if (part.model, part.day, part.number) != (self.model, day, number) or type(part.rows) is not int:
            raise self._broken(key, f"it is of {part.model}, {part.day}, number {part.number}")
        return part

    def _document(self, key: str) -> dict[str, Any]:
        body = self._store.get(key)
        try:
            found = json.loads(body)
        except ValueError as error:
            raise self._broken(key, str(error)) from None
        if not isinstance(found, dict) or canonical_json(found) != body:
            raise self._broken(key, "its bytes are not what was written")
        return found

    def _day_key(self, day: str, number: int) -> str:
        return f"{self._root}/days/{checked_day(day)}/{number:04d}"

    def _reference_key(self, version: str, fallback: str) -> str:
        return f"{self._root}/reference/{version}-{fallback or 'none'}"

    def _broken(self, key: str, what: str) -> EvidenceError:
        return EvidenceError(
            f"the object {key} is no record of what {self.model} served ({what}). It cannot be judged by it. Restore serving/ from "
            "a backup of the store and find out who can write to it."
        )


def checked_day(day: str) -> str:
    """A day as it is written, YYYY-MM-DD. Raises ConfigError for anything else."""
    with suppress(ValueError):
        if date.fromisoformat(day).isoformat() == day:
            return day
    raise ConfigError(f"'{day}' is not a day, so nothing was done. Write it like 2013-12-24.")


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """A table as Parquet; equal tables give equal bytes."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()


def parquet_frame(body: bytes, what: str) -> pd.DataFrame:
    """A table from Parquet. Raises EvidenceError when the bytes are no table."""
    try:
        return pd.read_parquet(io.BytesIO(body))
    except Exception as error:  # pyarrow raises errors of its own for rubbish
        raise EvidenceError(f"{what} cannot be read ({type(error).__name__}: {error}). Restore the object from a backup.") from None

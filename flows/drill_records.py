"""Drills on record: what `seatrial drill` showed, under the home as drills/NAME.json, bound to the code that it was shown with."""

import json
from dataclasses import asdict
from pathlib import Path

from flows.code_digests import gate_code_sha256
from validation.canonical import canonical_json
from validation.records import Drill

VERSION = 1
RECIPE = "trainer.drill_recipe:recipe"
FOLDER = "drills"  # under the home


def keep(home: Path, drill: Drill) -> None:
    """Keep what a drill showed, in place of what the last one of its name did."""
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{drill.name}.json"
    new.write_bytes(canonical_json({"version": VERSION, "code": _code(), **asdict(drill)}))
    new.replace(folder / f"{drill.name}.json")


def _code() -> str:
    """What a drill's result depends on: what readiness reaches, drills and trainer among it."""
    return gate_code_sha256("readiness", RECIPE)


def on_record(home: Path) -> tuple[Drill, ...]:
    """The drills that were run with this very code, by name; records of other code, and what cannot be read, show nothing."""
    found = []
    for path in sorted((home / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            if record.pop("version") == VERSION and record.pop("code") == _code():
                found.append(Drill(**record))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return tuple(found)

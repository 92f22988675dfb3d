"""torch's own analyser of flight-recorder dumps (torchfrtrace) on a folder of JSON dumps, mended so that it runs on gloo's.

As shipped it raises KeyError on every gloo dump: `pg_config` names no group and no members. Both are filled in from the entries here.
Runs in a warm process: it needs torch.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any


def blamed(folder: str, world_size: int, reverse: bool = False) -> tuple[int, ...] | str:
    """Ranks that it calls missing or different at the first collective that it finds fault with; what it raised, when it fails.

    Args: reverse, read the files in the other order: it takes the first one for right.
    """
    from torch.distributed.flight_recorder.components.builder import build_db

    logging.disable(logging.CRITICAL)
    details = _details(Path(folder), world_size, reverse)
    arguments = argparse.Namespace(
        verbose=False, print_stack_trace=False, allow_incomplete_ranks=True, just_print_entries=False, mismatch_cap=10,
        selected_ranks=None, pg_filters=None,
    )  # fmt: skip
    try:
        database = build_db(details, arguments, str(next(iter(details.values()))["version"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for collective in database.collectives:
        named = {*(collective.missing_ranks or ()), *(collective.mismatch_collectives or ())}
        if named:
            return tuple(sorted(named))
    return ()


def _details(folder: Path, world_size: int, reverse: bool) -> dict[str, Any]:
    newest = {_rank(path): path for moment in ("hang", "hang2", "after") for path in folder.glob(f"rank*.{moment}.json")}
    details: dict[str, Any] = {}
    for rank, path in sorted(newest.items(), reverse=reverse):
        dump = json.loads(path.read_text())
        details[path.name] = {
            "host_name": f"host_rank{rank}", "rank": rank, "entries": [_mended(entry) for entry in dump["entries"]],
            "version": dump["version"],
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": str(members)}
                for name, description, members in _groups(dump, world_size)
            },
        }  # fmt: skip
    return details


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank").partition(".")[0])


def _mended(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "process_group": tuple(entry["process_group"]), "frames": []}


def _groups(dump: dict[str, Any], world_size: int) -> list[tuple[str, str, list[int]]]:
    """Name, description and members of every group that is used; of all ranks, unless our recording knows better."""
    known = dump.get("sea_trial", {}).get("groups", {})
    used = {tuple(entry["process_group"]) for entry in dump["entries"]} | {("0", "default_pg")}
    return [(name, description, known.get(name, {}).get("ranks", list(range(world_size)))) for name, description in sorted(used)]

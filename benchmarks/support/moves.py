"""Who moved a model's pointer, and who lost: what all journals of the model claim, held against each other and against the pointer."""

import json
from collections.abc import Mapping
from typing import Any

from infra.journal import Entry


def judge_moves(histories: Mapping[str, tuple[Entry, ...]], pointer: Mapping[str, Any]) -> None:
    """Of every place in the pointer's sequence one journal says that it won it, and who lost names a winner. Raises AssertionError."""
    won: dict[int, dict[str, Mapping[str, Any]]] = {}  # place -> the pointers that were put there
    lost: list[tuple[str, str]] = []  # who, to whom
    for name, entries in histories.items():
        for mine, result in moves_of(entries):
            winner = result.get("served_by") or (result.get("overtaken_by") or {}).get("release_id") or result.get("by") or name
            if winner == name and result.get("moved") is not False:
                won.setdefault(mine["sequence"], {})[json.dumps(mine, sort_keys=True)] = mine
            elif not (result.get("why") or result.get("because")):
                lost.append((name, winner))
    winners = {item["release_id"] for places in won.values() for item in places.values()}
    for name, entries in histories.items():
        over = next((entry.sequence for entry in entries if entry.kind == "abandoned"), len(entries))
        assert not [entry for entry in entries[over:] if entry.kind == "intent"], f"{name} was abandoned and did something all the same"
        ended = next((entry.payload for entry in reversed(entries) if entry.kind == "decided"), {"reason": "", "decision": ""})
        if "since release " in ended["reason"]:
            lost.append((name, ended["reason"].rpartition("since release ")[2]))
        assert ended["decision"] != "promoted" or name in winners, f"{name} calls itself promoted and moved nothing"
    assert all(len(places) == 1 for places in won.values()), f"two winners of one move: {won}"
    assert sorted(won) == list(range(1, pointer["sequence"] + 1)), f"moves {sorted(won)} are claimed, the pointer is {pointer}"
    assert list(won[pointer["sequence"]].values()) == [pointer], f"the last move is {won[pointer['sequence']]}, the pointer {pointer}"
    nobody = [item for item in lost if item[1] not in winners or item[0] == item[1]]
    assert not nobody, f"lost to nobody who won: {nobody}"


def judge_pages(histories: Mapping[str, tuple[Entry, ...]], said: Mapping[str, str], serving: str) -> None:
    """A version that an act took out of service is called so. Raises AssertionError."""
    for name, entries in histories.items():
        if any(result.get("moved") for _, result in moves_of(entries)):
            marks = [step["plan"] for step in entries[0].payload["steps"] if step["effect"] == "mark"]
            wrong = [mark for mark in marks if mark["version"] != serving and said[mark["version"]] != mark["status"]]
            assert not wrong, f"{name} said {wrong}, the pages say {said}"


def moves_of(entries: tuple[Entry, ...]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The pointers that a journal meant to put in force, each with what came of it."""
    meant = {
        of(entry): entry.payload["plan"]["pointer"] for entry in entries if entry.kind == "intent" and "pointer" in entry.payload["plan"]
    }
    return [(meant[of(entry)], entry.payload["result"]) for entry in entries if entry.kind == "done" and of(entry) in meant]


def of(entry: Entry) -> tuple[str, str]:
    """What an intent and its done have in common."""
    return entry.payload["effect"], entry.payload["of"]

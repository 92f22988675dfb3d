"""Let two acts on one model begin at once, kill one now and then, and demand that one won and the other says to whom it lost.

    python benchmarks/race_campaign.py [--store folder|s3|both] [--trials 6] [--seed 1] [--only "release|rollback"] [--json] [--quick]

Pairs are what two people, two schedules or two machines can do at the same time: release, rollback (a person's, or the monitor's with the
version that it found bad), reconcile, and finish, abandon, approve of a release that died or waits for a person. Two promoted versions
stand when a race begins, and none before a first release. Where reconcile races, in every second trial the files of the last known-good
were altered, so that it moves the pointer too. Both begin in processes of their own, 0 to 100 ms apart by the seed. In a third of the
trials one of them gets a SIGKILL: from outside at a random moment, or at one of its writes. In two thirds they also wait for each other
before one write, mostly the pointer's: an act takes seconds and its move milliseconds. What has to hold when both are over, seen from
fresh processes:

    1. both did what they were asked, or said who was faster, or refused and named the next step; nothing else was raised;
    2. the pointer names a version whose signed statement and model files verify;
    3. every release and act can be brought to its end by anybody;
    4. then reconcile mends what differs and finds nothing more; aliases are the pointer's; of every version something is said, and none is
       there twice; `seatrial show` and `seatrial verify` find nothing wrong;
    5. the moves that journals claim are 1, 2, 3, ... up to the pointer's, each won once; a loser names one of the winners; a version
       that was rolled back is called so;
    6. doing 3 and 4 once more changes no byte under any key, no alias and no page.

Peer: one act after the other. The ratio is the share of races after which all of this held; it has to be 1.
Limits: the hands are rehearsed (support/rehearsal.py): no ranks, no torch, models are not loaded, the flow `finish` is played without
Prefect. One machine, two processes; the registry is MLflow on SQLite. moto's server stays up.
"""

import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crash_campaign import APPROVAL, Story, Yard, everything, place, set_scene, verified
from support.moves import judge_moves, judge_pages
from support.output import Document, parser, progress, publish
from support.processes import answered, apart, demand, started, warm_up
from support.racers import ACTS, AT_THE_START, THIRD, Meeting, part_of, quiet, rehearsed, released
from support.rehearsal import MODEL, Fuse

from flows import history
from flows.acts import open_desk
from flows.finishing import finish, what_is_left
from flows.reconcile import reconcile_model
from flows.verifying import verify
from infra.journal import Journal, list_releases
from infra.pointer import read_pointer
from infra.registry import pointer_aliases
from validation.canonical import canonical_json, sha256_hex

DEADLINE_S = 300  # of one racer; a race takes seconds
APART_S = 0.1
KINDS = ("started", "decision", "intent", "done", "decided", "finished", "abandoned")
MEETINGS = (
    *("models/boat/pointer",) * 4, *(AT_THE_START,) * 4, "/owner", "mlflow describe", "mlflow mark", "mlflow mirror",
    *(f"-{kind}" for kind in KINDS),
)  # fmt: skip

PAIRS = (
    ("release", "release"), ("release", "rollback"), ("release", "reconcile"), ("rollback", "rollback"), ("rollback", "reconcile"),
    ("reconcile", "reconcile"), ("finish", "finish"), ("finish", "release"), ("finish", "rollback"), ("finish", "reconcile"),
    ("finish", "abandon"), ("approve", "finish"), ("approve", "approve"), ("approve", "release"), ("approve", "rollback"),
    ("first release", "first release"),
)  # fmt: skip
MAY_REFUSE = ("finish", "abandon", "approve")  # another process has the release, or it is over
NEXT_STEP = ("run the command again", "`seatrial", "Release again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One race and what came of it."""

    store: str
    pair: str
    killed: bool
    wrong: str = ""  # "" = all held


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """What kills a racer."""

    slot: int = -1  # whom; -1: nobody
    after_s: float | None = None  # from outside, counted from the start
    fuse: tuple[int, bool] = (-1, False)  # or at a write of its own, before or after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a race begins."""

    offsets: tuple[float, float]  # seconds
    meets: tuple[str, ...]  # the write before which each waits for the other; "" = it does not


# --- afterwards -------------------------------------------------------------------------------------------------------------------


def at_rest(yard: Yard) -> str:
    """Bring everything to its end and judge what stands then; the sha256 of all of it. Raises AssertionError with what is wrong."""
    verified(yard)
    settings = yard.settings()
    rehearsed(settings, Fuse())
    desk = open_desk(settings, quiet)
    for release_id in list_releases(desk.store, MODEL):
        entries = Journal(desk.store, release_id).records()
        if not entries or any(entry.kind == "abandoned" for entry in entries):
            continue  # it never began, or is over
        if what_is_left(entries) != "nothing":
            finish(settings, say=quiet, release_id=release_id)
        assert what_is_left(Journal(desk.store, release_id).records()) == "nothing", f"{release_id} came to no end"
    mended, told = reconcile_model(desk, MODEL), reconcile_model(desk, MODEL)
    assert (told["state"], told["differences"], told["notes"]) == ("in_step", [], []), f"reconcile: {mended}, then {told}"
    verified(yard)
    pointer, _ = read_pointer(desk.store, MODEL)
    assert pointer is not None
    aliases, pages = desk.registry.all_aliases(MODEL), desk.registry.pages(MODEL)
    assert aliases == pointer_aliases(pointer), f"aliases {aliases}, pointer {pointer}"
    assert all(page.status for page in pages), f"nothing was said of versions {[page.version for page in pages if not page.status]}"
    made = Counter((page.run_id, page.tags["artifact"], page.tags["of"]) for page in pages)
    assert max(made.values()) == 1, f"registered twice: {made.most_common(1)}"
    names = [(root, name) for root in ("releases", "acts") for name in list_releases(desk.store, MODEL, root=root)]
    histories = {name: Journal(desk.store, name, root=root).records() for root, name in names}
    judge_moves(histories, json.loads(canonical_json(pointer)))
    judge_pages(histories, {page.version: page.status for page in pages}, pointer.serving_version)
    shown = [str(row.get("decision")) for row in history.overview(desk.store)["releases"]]
    assert not {"unverifiable", "unfinished"} & set(shown), f"shown as {shown}"
    assert not (problems := verify(settings, say=quiet, what=MODEL)["problems"]), f"verify: {problems}"
    bodies = {key: sha256_hex(body) for key, body in everything(desk.store).items()}
    return sha256_hex(canonical_json({"bodies": bodies, "aliases": aliases, "pages": pages}))


def how_it_ended(yard: Yard) -> str:
    """What is wrong after a race; "" when everything held."""
    word, first = apart(lambda: at_rest(yard))
    if word != "done":
        return f"{word}: {first}"
    again = apart(lambda: at_rest(yard))
    return "" if again == ("done", first) else f"doing it once more changed something: {again}"


# --- races ------------------------------------------------------------------------------------------------------------------------


def spoil(yard: Yard) -> None:
    """Alter the files of the last known-good."""
    desk = open_desk(yard.settings(), quiet)
    pointer, _ = read_pointer(desk.store, MODEL)
    assert pointer is not None
    run_id = next(page.run_id for page in desk.registry.pages(MODEL) if page.version == pointer.last_known_good)
    (yard.home / "rehearsed" / desk.registry.run_tags(run_id)["release_id"] / "candidate" / "weights").write_bytes(b"other")


def run(yard: Yard, pair: tuple[str, str], start: Start, blow: Blow) -> list[tuple[str, Any]]:
    """Both acts at once; what each said: "done" and its word, writes and seconds, or as `apart`."""
    go = time.monotonic() + APART_S  # both are forked before the first one begins
    here = [yard.home / f"racer-{slot}" for slot in (0, 1)]

    def racer(slot: int) -> dict[str, Any]:
        signal.alarm(DEADLINE_S)
        at, after = blow.fuse if slot == blow.slot else (-1, False)
        settings, fuse = yard.settings(), Meeting(at=at, after=after, meets=start.meets[slot], mine=here[slot], other=here[1 - slot])
        rehearsed(settings, fuse)
        time.sleep(max(0.0, go + start.offsets[slot] - time.monotonic()))
        if start.meets[slot] == AT_THE_START:
            fuse.wait()
        try:
            said = ACTS[pair[slot]](settings, fuse, slot)
        finally:
            here[slot].touch()
        return {"said": said, "writes": fuse.names, "lasted": time.monotonic() - go}

    begun = [started(partial(racer, slot)) for slot in (0, 1)]
    if blow.after_s is not None:
        time.sleep(max(0.0, go + blow.after_s - time.monotonic()))
        os.kill(begun[blow.slot][0], signal.SIGKILL)
    return [answered(*item) for item in begun]


def unexplained(pair: tuple[str, str], ends: list[tuple[str, Any]], blow: Blow) -> str:
    """An end that no act may have; "" when both are good ends."""
    for slot, (word, value) in enumerate(ends):
        refused = word == "error" and pair[slot] in MAY_REFUSE and value.startswith(("ConflictError", "ConfigError"))
        good = word == "done" or (word == "killed" and slot == blow.slot) or (refused and any(step in value for step in NEXT_STEP))
        if not good:
            return f"{pair[slot]} ended with {word}: {value}"
    return ""


def hold(yard: Yard, pair: tuple[str, str], options: Any, races: list[Race]) -> None:
    """All races of one pair."""
    chance, name = random.Random(f"{options.seed} {yard.kind} {pair}"), "|".join(pair)
    waits = (part_of(THIRD, APPROVAL),) if "approve" in pair else ()
    two = () if "first release" in pair else (part_of(0), part_of(1))
    set_scene(yard, Story(name=name, before=(*two, *waits), part=part_of(THIRD)))
    counter, dies = Fuse(), "finish" in pair and not waits
    names = demand(*apart(lambda: [played(yard, counter), counter.names][1])) if dies else []
    decided = next((at for at, write in enumerate(names) if write.endswith("-decision")), 0)
    writes, lasted = [[""], [""]], [1.0, 1.0]  # of each racer, as the trials before this one had them
    for trial in range(2 if options.quick else options.trials):
        yard.restore()
        if names:  # half of them had decided
            fuse = Fuse(at=chance.randrange(decided if trial % 2 else 3, len(names)), after=chance.random() < 0.5)
            apart(partial(played, yard, fuse))
        if "reconcile" in pair and not names and trial % 2:
            demand(*apart(partial(spoil, yard)))
        late = chance.uniform(0, APART_S)
        offsets, meeting = ((late, 0.0) if chance.random() < 0.5 else (0.0, late)), chance.random() < 2 / 3
        start = Start(offsets=offsets, meets=tuple(chance.sample(MEETINGS, 2)) if meeting else ("", ""))
        blow, slot = Blow(), chance.randrange(2)
        if trial % 3 == 1:
            outside = chance.random() < 0.5
            blow = Blow(
                slot=slot, after_s=chance.uniform(0, lasted[slot]) if outside else None,
                fuse=(-1, False) if outside else (drawn(writes[slot], chance), chance.random() < 0.5),
            )  # fmt: skip
        ends = run(yard, pair, start, blow)
        for slot, (word, value) in enumerate(ends):
            if word == "done":
                writes[slot], lasted[slot] = value["writes"] or [""], value["lasted"]
        wrong = unexplained(pair, ends, blow) or how_it_ended(yard)
        races.append(Race(store=yard.kind, pair=name, killed=any(word == "killed" for word, _ in ends), wrong=wrong))
        told = [value["said"] if word == "done" else f"{word} {value or ''}"[:60] for word, value in ends]
        progress(f"{'WRONG ' if wrong else ''}{yard.kind}: {name} {trial}: {', '.join(told)}{' ' + wrong if wrong else ''}")


def drawn(names: list[str], chance: random.Random) -> int:
    """A write to die at: any, one of the first, or one about the move of the pointer."""
    move = next((at for at, name in enumerate(names) if name.endswith("/pointer")), 0)
    return chance.choice((chance.randrange(len(names)), chance.randrange(4), max(0, move + chance.randint(-3, 3))))


def played(yard: Yard, fuse: Fuse) -> str:
    """The third release, as far as the fuse lets it."""
    return released(yard.settings(), fuse, 0, number=THIRD)


def of_pair(races: list[Race], kind: str, name: str) -> list[Race]:
    """The races of one pair on one store."""
    return [race for race in races if (race.store, race.pair) == (kind, name)]


def row(kind: str, name: str, mine: list[Race]) -> dict[str, Any]:
    """Their row of the table."""
    kills, held = sum(race.killed for race in mine), sum(not race.wrong for race in mine)
    return {"store": kind, "pair": name, "trials": len(mine), "kills": kills, "held": held}


def main() -> int:
    """Race, kill, bring to an end, judge, print."""
    options = parser(__doc__)
    options.add_argument("--store", choices=("folder", "s3", "both"), default="both")
    options.add_argument("--trials", type=int, default=6, help="races a pair")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="pairs in which this stands, as release|rollback or finish")
    arguments = options.parse_args()
    warm_up()

    for name, level in (("werkzeug", logging.ERROR), ("mlflow", logging.WARNING), ("alembic", logging.WARNING)):
        logging.getLogger(name).setLevel(level)

    races: list[Race] = []
    kinds = ("folder",) if arguments.quick else ("folder", "s3") if arguments.store == "both" else (arguments.store,)
    pairs = [pair for pair in PAIRS if arguments.only in "|".join(pair)][: 2 if arguments.quick else None]
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, place(Path(folder), kind) as yard:
            for pair in pairs:
                hold(yard, pair, arguments, races)
    held = sum(not race.wrong for race in races)
    rows = [row(kind, name, mine) for kind in kinds for name in map("|".join, pairs) if (mine := of_pair(races, kind, name))]
    document = Document(
        name="race_campaign", peer="one act after the other", ratio=held / max(len(races), 1), goal=1.0, samples=rows,
        met=bool(races) and held == len(races),
        unit="share of races after which one had won, what served verified and everything came to its end",
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0 if document.met else 1


if __name__ == "__main__":
    sys.exit(main())

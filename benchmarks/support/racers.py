"""What the racers of race_campaign.py do: each act as its command or flow does it, with rehearsed hands, in a process of its own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.rehearsal import MODEL, Fuse, FusedRegistry, FusedStore, Part, rehearse

import flows.release
from flows import acts, approving, finishing, reconcile, rollback
from flows.clock import utc_now
from flows.conduct import PLAIN, conduct
from flows.finishing import abandon, finish, what_is_left
from flows.ownership import check_owner, known_entries, owning
from flows.promote import make_true
from infra.journal import Journal
from infra.pointer import read_pointer
from infra.registry import Registry
from infra.settings import Settings
from infra.store import open_store
from validation.policy import GATES

THIRD = 2  # the number of the release that died or waits; the two before it were promoted
RACERS = 7  # the number of the first racer's own release
AT_THE_START = "the start"  # where a racer waits until the other one has come to its write, which then waits for this one's end
PATIENCE_S = 4.0  # how long a racer waits for the other one, which may never come to that write


@dataclass
class Meeting(Fuse):
    """A fuse that holds its process before one write until the other racer has come to its own, so that both go on from there at once."""

    meets: str = ""  # part of that write's name; "" = it waits for nobody
    mine: Path = Path()  # is there once this racer came, or is over
    other: Path = Path()

    def around(self, name: str, act: Callable[[], Any]) -> Any:
        """Do one write."""
        if self.meets and self.meets in name and not self.mine.exists():
            self.mine.touch()
            self.wait()
        return super().around(name, act)

    def wait(self) -> None:
        """Until the other one came, or for so long."""
        until = time.monotonic() + PATIENCE_S
        while not self.other.exists() and time.monotonic() < until:
            time.sleep(0.0005)


def name_of(number: int) -> str:
    """The id of a rehearsed release."""
    return f"{MODEL}-20260101-000000-{number:04d}"


def part_of(number: int, policy: str = "") -> Part:
    """What a release of this number is like."""
    return Part(weights=f"boat {number}".encode(), policy=policy)


def released(settings: Settings, fuse: Fuse, slot: int, *, number: int = 0) -> str:
    """A release from its first record to its end, as the flow does it."""
    number = number or RACERS + slot
    store: Any = FusedStore(open_store(settings), fuse)
    registry: Any = FusedRegistry(Registry(settings), fuse)
    release = rehearse(settings, store, registry, part_of(number), number=number)
    started_with = {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}
    with owning(store, release.plan.release_id) as owner:
        release.still_mine = partial(check_owner, store, owner)
        release.journal.append("started", started_with, time_utc=utc_now())
        return str(conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")[0]["decision"])


def rehearsed(settings: Settings, fuse: Fuse) -> None:
    """In this process: stores and registries burn the fuse, models answer without being loaded, `finish` goes on without Prefect."""

    def go_on(release_id: str) -> dict[str, Any]:
        store, registry = finishing.open_store(settings), finishing.Registry(settings)
        policy = Journal(store, release_id).records()[0].payload["request"]["policy_text"]
        number = int(release_id.rpartition("-")[2])
        release = rehearse(settings, store, registry, part_of(number, policy), number=number)
        with owning(store, release_id) as owner:
            release.still_mine = partial(check_owner, store, owner)
            if what_is_left(known_entries(release.journal)) == "effects":
                make_true(release.desk)
            return conduct(release, PLAIN, keep="any")[0]

    for module in (acts, approving, finishing):
        replaced: Any = module
        replaced.open_store = lambda given, **named: FusedStore(open_store(given, **named), fuse)
        replaced.Registry = lambda given: FusedRegistry(Registry(given), fuse)
    rollback.refusal = reconcile.refusal = lambda *_: ""
    rollback.ranks.warm_up = lambda **_: None
    finishing.start_early = lambda _: None
    flows.release.go_on = go_on


def rolled_back(settings: Settings, _fuse: Fuse, slot: int) -> str:
    """A person's rollback; the second racer is the monitor, which names the version that it found bad."""
    now, _ = read_pointer(open_store(settings), MODEL)
    leaving = now.serving_version if slot and now else ""
    return str(rollback.fall_back(settings, MODEL, "it leaks", by="monitor" if slot else "Ada", leaving=leaving)["outcome"])


def finished(settings: Settings, _fuse: Fuse, _slot: int) -> str:
    """The third release, brought to its end."""
    return str(finish(settings, say=quiet, release_id=name_of(THIRD))["decision"])


def abandoned(settings: Settings, _fuse: Fuse, _slot: int) -> str:
    """The third release, given up."""
    return str(abandon(settings, say=quiet, release_id=name_of(THIRD), reason="its machine is gone")["decision"])


def approved(settings: Settings, _fuse: Fuse, slot: int) -> str:
    """A person's yes to the third release, and what it decides with it."""
    by = ("Ada", "Grace")[slot]
    return str((approving.approve(settings, say=quiet, release_id=name_of(THIRD), by=by, reason="seen")["decision"] or {}).get("decision"))


def reconciled(settings: Settings, _fuse: Fuse, _slot: int) -> str:
    """Registry against pointer."""
    return str(reconcile.reconcile_model(acts.open_desk(settings, quiet), MODEL)["state"])


ACTS: Mapping[str, Callable[[Settings, Fuse, int], str]] = {
    "first release": released, "release": released, "rollback": rolled_back, "reconcile": reconciled, "finish": finished,
    "abandon": abandoned, "approve": approved,
}  # fmt: skip


def quiet(_: str) -> None:
    """Nobody reads along."""

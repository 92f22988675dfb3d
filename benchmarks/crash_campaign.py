"""Kill a release at every write, before it and right after it, and demand that what serves verifies and that any process can end it.

    python benchmarks/crash_campaign.py [--store folder|s3|both] [--random 40] [--seed 1] [--json] [--quick]

Five stories: a model's first release; a second one that is promoted over it; one that is refused; one that is refused while what served
no longer loads, so that the baseline has to serve; one that waited for a person and was approved. Each is played once undisturbed, which
says how many writes it makes (journal, evidence, signed statements, pointer, admissions, MLflow runs, versions, tags, pages, aliases). Then
it is played again for every write with a SIGKILL before it, and with one right after it; and `--random` times with a SIGKILL from outside
at a random moment, which also falls into the middle of a write. After each death, in a fresh process:

    1. the pointer, if there is one, names a version whose signed statement and model files verify;
    2. the release is taken up again and ends as the undisturbed one did: decision, serving version's files, aliases, one version a model
       that was registered, a journal that verifies;
    3. taking it up once more changes nothing: same bytes under every key.

A third of the takers are killed too, at a write of their own, and then a second one takes over.

Peer: the undisturbed release. The ratio is the share of deaths after which all of this held; it has to be 1.
Limits: the hands are rehearsed (support/rehearsal.py): no ranks, no torch. The machine itself stays up, and so does moto's server.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import md5
from pathlib import Path
from typing import Any

from support.output import Document, parser, progress, publish
from support.processes import apart, demand, warm_up
from support.rehearsal import MODEL, Fuse, FusedRegistry, FusedStore, Part, rehearse

from flows.clock import utc_now
from flows.conduct import PLAIN, conduct
from flows.finishing import what_is_left
from flows.people import checked_answer, people_of, record_approval
from flows.promote import make_true
from flows.proving import prove
from flows.under_way import Release
from infra.attestations import open_reader
from infra.export import files_sha256, version_uri
from infra.journal import Journal
from infra.pointer import read_pointer
from infra.registry import Registry, pointer_aliases
from infra.settings import Settings, embedded_environment, load_settings
from infra.store import ObjectStore, open_store
from validation.canonical import sha256_hex
from validation.policy import GATES

APPROVAL = "decision: {approval: true}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened before, and the release that is killed."""

    name: str
    before: tuple[Part, ...]
    part: Part
    approved: bool = False  # a person says yes between two halves of the release


FIRST, SECOND = Part(weights=b"first"), Part(weights=b"second")
STORIES = (
    Story(name="first release", before=(), part=FIRST),
    Story(name="promoted over another", before=(FIRST,), part=SECOND),
    Story(name="refused", before=(FIRST,), part=Part(weights=b"second", floats={"slice_quality": 0.1})),
    Story(name="refused, what served is broken", before=(FIRST,), part=Part(weights=b"second", floats={"scaling": 0.1}, loads=False)),
    Story(name="approved by a person", before=(FIRST,), part=Part(weights=b"second", policy=APPROVAL), approved=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a release ended, as anyone can see it."""

    decision: str
    serving_files: str  # sha256 of the serving version's files
    serving_kind: str
    aliases: tuple[str, ...]
    versions: int  # of the model
    keys: str  # sha256 over all keys and bytes that stand in the store


class Yard:
    """One home, one store, always at the same place; what stood before a story is put back for every death."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.home = folder / "the home"
        self.kept = folder / "kept"
        self.kind = kind
        self.objects: dict[str, bytes] = {}
        os.environ["SEATRIAL_HOME"] = str(self.home)

    def settings(self) -> Settings:
        """As every process reads them."""
        settings = load_settings()
        os.environ.update(embedded_environment(settings))
        return settings

    def keep(self) -> None:
        """Remember home and store as they are."""
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.home, self.kept)
        self.objects = everything(open_store(load_settings())) if self.kind == "s3" else {}

    def restore(self) -> None:
        """Put back what was kept."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.kept, self.home)
        if self.kind == "s3":
            store, now = open_store(load_settings()), self.contents()
            for key in set(now) - set(self.objects):
                store.delete(key)
            for key, body in self.objects.items():
                if now.get(key) != md5(body, usedforsecurity=False).hexdigest():
                    put_back(store, key, body)

    def contents(self) -> dict[str, str]:
        """Key -> digest of every object; a bucket is asked for all of them at once."""
        settings = load_settings()
        if self.kind == "folder":
            store = open_store(settings)
            return {key: sha256_hex(store.get(key)) for key in store.list("")}
        bucket, _, prefix = settings.store.removeprefix("s3://").partition("/")
        import boto3

        client = boto3.client("s3", endpoint_url=settings.store_endpoint, region_name=settings.store_region)  # not one of before a fork
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        found = [item for page in pages for item in page.get("Contents", ())]
        return {item["Key"].removeprefix(f"{prefix}/"): item["ETag"].strip('"') for item in found}


def everything(store: ObjectStore) -> dict[str, bytes]:
    """Every object of a store."""
    return {key: store.get(key) for key in store.list("")}


def put_back(store: ObjectStore, key: str, body: bytes) -> None:
    """Make an object hold these bytes again."""
    if not store.exists(key):
        store.put_new(key, body)
    elif (found := store.get_with_etag(key))[0] != body:
        store.replace(key, body, found[1])


# --- what a process does ----------------------------------------------------------------------------------------------------------


def play(yard: Yard, story: Story, part: Part, number: int, fuse: Fuse) -> None:
    """One whole release, in this process."""
    settings = yard.settings()
    store: Any = FusedStore(open_store(settings), fuse)
    registry: Any = FusedRegistry(Registry(settings), fuse)
    release = rehearse(settings, store, registry, part, number=number)
    release.journal.append(
        "started", {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}, time_utc=utc_now()
    )
    conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    if story.approved and part is story.part:
        take_up(yard, story, number, fuse)


def take_up(yard: Yard, story: Story, number: int, fuse: Fuse) -> None:
    """Bring a release to its end, whoever died with it; a person says yes where one is waited for."""
    settings = yard.settings()
    store: Any = FusedStore(open_store(settings), fuse)
    registry: Any = FusedRegistry(Registry(settings), fuse)
    release = rehearse(settings, store, registry, story.part, number=number)
    if not release.journal.records():
        begin(release)
    left = what_is_left(release.journal.records())
    if left == "judging":
        conduct(release, PLAIN, keep="any")
    elif left == "effects":
        make_true(release.desk)
    if story.approved and not any(entry.kind == "approval" for entry in release.journal.records()):
        say_yes(release)
        conduct(rehearse(settings, store, registry, story.part, number=number), PLAIN, keep="any")


def say_yes(release: Release) -> None:
    """The person's word, without what the command does after it."""
    people = people_of(release.journal, release.notary, release.plan.policy, now=utc_now())
    answer = checked_answer("Ada", "seen", approved=True, days=1.0, made_at=utc_now())
    record_approval(release.journal, release.notary, people.basis, answer)


def begin(release: Release) -> None:
    """The first record."""
    started = {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}
    release.journal.append("started", started, time_utc=utc_now())


def verified(yard: Yard) -> str:
    """ "" when what serves verifies, else what is wrong."""
    settings = yard.settings()
    store, registry = open_store(settings), Registry(settings)
    pointer, _ = read_pointer(store, MODEL)
    if pointer is None:
        return ""
    files = files_sha256(version_uri(MODEL, pointer.serving_version), tracking_uri=registry.tracking_uri)
    prove(open_reader(store, settings), store, pointer.attestation, files_sha256=files)
    return ""


def ended(yard: Yard, number: int) -> Ended:
    """How the release stands now."""
    settings = yard.settings()
    store, registry = open_store(settings), Registry(settings)
    entries = Journal(store, rehearse(settings, store, registry, Part(), number=number).plan.release_id).records()
    pointer, _ = read_pointer(store, MODEL)
    assert pointer is not None
    aliases = registry.aliases(MODEL)
    assert aliases == pointer_aliases(pointer), f"aliases {aliases}, pointer {pointer}"
    found = registry.version(MODEL, pointer.serving_version)
    return Ended(
        decision=str(entries[-1].payload.get("decision", entries[-1].kind)), serving_files=found.sha256, serving_kind=pointer.serving_kind,
        aliases=tuple(sorted(aliases)), versions=len(registry.versions(MODEL)),
        keys=sha256_hex(json.dumps(yard.contents(), sort_keys=True).encode()),
    )  # fmt: skip


# --- deaths ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One death and what came of it."""

    story: str
    store: str
    at: str  # the write, or "outside"
    when: str
    wrong: str = ""  # "" = all held


def void(_: object) -> None:
    """Nothing of it."""


def set_scene(yard: Yard, story: Story) -> None:
    """Everything that happened before the story."""
    shutil.rmtree(yard.home, ignore_errors=True)
    yard.home.mkdir(parents=True)
    if yard.kind == "s3":
        yard.objects = {}
        yard.kept.mkdir(exist_ok=True)
        yard.restore()
        yard.home.mkdir(exist_ok=True)
    demand(*apart(lambda: void(Registry(yard.settings()))))  # its tables are made once
    for number, part in enumerate(story.before):
        demand(*apart(lambda part=part, number=number: play(yard, story, part, number, Fuse())))
    yard.keep()


def after_death(yard: Yard, story: Story, number: int, wanted: dict[str, Any], second: int) -> str:
    """What is wrong after a death; "" when everything held. Args: second, the write at which the taker dies too; -1: it lives."""

    def to_its_end() -> dict[str, Any]:
        verified(yard)
        take_up(yard, story, number, Fuse())
        return asdict(ended(yard, number))

    if second >= 0:
        apart(lambda: [verified(yard), take_up(yard, story, number, Fuse(at=second, after=bool(second % 2)))])
    word, first = apart(to_its_end)
    if word != "done":
        return f"it could not be taken up, or what served did not verify: {first}"
    different = [name for name in wanted if name != "keys" and first[name] != wanted[name]]
    if different:
        return "; ".join(f"{name} is {first[name]}, undisturbed {wanted[name]}" for name in different)
    _, again = apart(to_its_end)
    return "" if again == first else "taking it up once more changed something"


def tell(yard: Yard, story: Story, deaths: list[Death], options: Any, chance: random.Random) -> None:
    """One story: undisturbed, then with a death at every write, then with deaths from outside."""
    set_scene(yard, story)
    number, counter = len(story.before), Fuse()

    def undisturbed() -> list[str]:
        play(yard, story, story.part, number, counter)
        return counter.names

    began = time.monotonic()
    names = demand(*apart(undisturbed))
    lasted = time.monotonic() - began
    wanted = demand(*apart(lambda: asdict(ended(yard, number))))
    points = [(at, after) for at in range(len(names)) for after in (False, True)]
    if options.quick or options.sample:
        points = chance.sample(points, min(len(points), options.sample or 2))
    progress(f"{yard.kind}: {story.name}: {len(names)} writes, ends as {wanted['decision']} with {wanted['serving_kind']} serving")
    for done, (at, after) in enumerate(points):
        if done and done % 20 == 0:
            progress(f"{yard.kind}: {story.name}: {done} of {len(points)} deaths at writes")
        yard.restore()
        word, value = apart(lambda at=at, after=after: play(yard, story, story.part, number, Fuse(at=at, after=after)))
        second = chance.randrange(len(names)) if chance.random() < 1 / 3 else -1
        wrong = after_death(yard, story, number, wanted, second) if word == "killed" else f"it did not die: {word} {value}"
        deaths.append(Death(story=story.name, store=yard.kind, at=names[at], when="after" if after else "before", wrong=wrong))
        if wrong:
            progress(f"WRONG {deaths[-1]}")
    for _ in range(0 if options.quick else options.random):
        yard.restore()
        word, value = apart(lambda: play(yard, story, story.part, number, Fuse()), kill_after_s=chance.uniform(0, lasted))
        if word == "killed":
            deaths.append(
                Death(story=story.name, store=yard.kind, at="outside", when="", wrong=after_death(yard, story, number, wanted, -1))
            )
            if deaths[-1].wrong:
                progress(f"WRONG {deaths[-1]}")


@contextlib.contextmanager
def place(folder: Path, kind: str) -> Iterator[Yard]:
    """A yard on a local folder, or on a bucket of moto's server."""
    if kind == "folder":
        yield Yard(folder, kind)
        return
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "SEATRIAL_STORE": "s3://trial/a/prefix", "SEATRIAL_STORE_ENDPOINT": f"http://{host}:{port}", "SEATRIAL_STORE_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    }  # fmt: skip
    try:
        boto3.client("s3", endpoint_url=os.environ["SEATRIAL_STORE_ENDPOINT"], region_name="us-east-1").create_bucket(Bucket="trial")
        yield Yard(folder, kind)
    finally:
        server.stop()
        for name in ("SEATRIAL_STORE", "SEATRIAL_STORE_ENDPOINT", "SEATRIAL_STORE_REGION"):
            os.environ.pop(name, None)


def main() -> int:
    """Play, kill, take up, print."""
    options = parser(__doc__)
    options.add_argument("--store", choices=("folder", "s3", "both"), default="both")
    options.add_argument("--random", type=int, default=8, help="deaths from outside a story")
    options.add_argument("--sample", type=int, default=0, help="so many writes a story, drawn by the seed; 0 = all")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="one story")
    arguments = options.parse_args()
    warm_up()

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto tells every request
    logging.getLogger("mlflow").setLevel(logging.WARNING)

    deaths: list[Death] = []
    for kind in ("folder", "s3") if arguments.store == "both" else (arguments.store,):
        with tempfile.TemporaryDirectory() as folder, place(Path(folder), kind) as yard:
            for story in STORIES:
                if arguments.only in ("", story.name):
                    tell(yard, story, deaths, arguments, random.Random(f"{arguments.seed} {kind} {story.name}"))
    held = sum(not death.wrong for death in deaths)
    rows = [
        {"store": kind, "story": story.name, "deaths": len(mine), "held": sum(not death.wrong for death in mine)}
        for kind in ("folder", "s3")
        for story in STORIES
        if (mine := [death for death in deaths if (death.store, death.story) == (kind, story.name)])
    ]
    document = Document(
        name="crash_campaign", peer="the undisturbed release", ratio=held / max(len(deaths), 1), goal=1.0, samples=rows,
        met=bool(deaths) and held == len(deaths),
        unit="share of deaths after which what served verified and the release came to its end",
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0 if document.met else 1


if __name__ == "__main__":
    sys.exit(main())

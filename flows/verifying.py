"""`seatrial verify`: is everything that stands behind a release, or behind what a model serves, whole? Fast: neither torch nor Prefect.

    a release  its journal; every attempt of every gate; what people said; the last decision, made again
    an act     its journal; the statement that it signed
    a model    pointer -> statement -> all it rests on -> the files in the registry; its fallbacks likewise; aliases against the pointer

Nothing is written. Each problem says what is broken, what it means and what to do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from flows.clock import utc_now
from flows.proving import RESTORE, Link, Proof, gate_link
from flows.proving import prove as prove
from infra.attestations import Notary, open_reader
from infra.journal import Entry, Journal
from infra.pointer import Pointer, admission, pointer_key, read_pointer
from infra.registry import ALIASES, Registry, pointer_aliases
from infra.settings import Settings
from infra.store import ObjectStore, get_evidence, open_store
from validation.canonical import plain
from validation.errors import ConfigError, EvidenceError, StoreError
from validation.statements import APPROVAL, WAIVER
from validation.waivers import lapsed

Say = Callable[[str], Any]

_SAID = {"waiver": WAIVER, "approval": APPROVAL}


@dataclass
class _Look:
    """What was looked at so far."""

    settings: Settings
    store: ObjectStore
    notary: Notary
    say: Say
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, and no problem

    def holds(self, name: str, sha256: str, detail: str) -> None:
        """Something is whole."""
        self.links.append(Link(name=name, sha256=sha256, ok=True, detail=detail))

    def broken(self, name: str, sha256: str, detail: str) -> None:
        """Something is not."""
        self.links.append(Link(name=name, sha256=sha256, ok=False, detail=detail))
        self.say(f"{name}: {detail}")

    @contextmanager
    def looking(self, name: str, sha256: str = "") -> Iterator[None]:
        """What cannot be shown is a broken link, and the rest is looked at all the same."""
        try:
            yield
        except (EvidenceError, StoreError) as error:
            self.broken(name, sha256, str(error))

    def proven(self, name: str, sha256: str, files_sha256: str | None = None) -> Proof | None:
        """A statement's proof, its links added; None when it is broken."""
        with self.looking(name, sha256):
            proof = prove(self.notary, self.store, sha256, files_sha256=files_sha256)
            self.links += [Link(name=f"{name}: {link.name}", sha256=link.sha256, ok=True, detail=link.detail) for link in proof.links]
            return proof
        return None


def verify(settings: Settings, *, say: Say, what: str) -> dict[str, Any]:
    """Check everything behind a release, an act or a model; nothing is written.

    Raises: ConfigError when there is no such release, act or model.
    """
    store = open_store(settings, writable=False)
    look = _Look(settings, store, open_reader(store, settings), say)
    kind, subject = _kind_of(store, what)
    headline = {"release": _release, "act": _act, "model": _model}[kind](look, what)
    wrong = [link for link in look.links if not link.ok]
    if wrong:
        headline = f"{kind} {what} does not verify: {len(wrong)} of {len(look.links)} links are broken, first '{wrong[0].name}'"
    return {
        "ok": not wrong, "what": what, "kind": kind, "headline": headline, **subject, "links": plain(look.links),
        "problems": [f"{link.name}: {link.detail}" for link in wrong], "notes": look.notes,
    }  # fmt: skip


def lines(document: Mapping[str, Any]) -> list[str]:
    """A verification for people: what is wrong first, or what holds."""
    told = [str(document["headline"])]
    if document["ok"]:
        told += [f"  {link['name']}{_short(link['sha256'])}: {link['detail']}" for link in document["links"]]
    told += [f"  BROKEN {problem}" for problem in document["problems"]]
    return [*told, *(f"  note: {note}" for note in document["notes"])]


def _short(sha256: str) -> str:
    return f" {sha256[:12]}…" if sha256 else ""


def _kind_of(store: ObjectStore, what: str) -> tuple[str, dict[str, str]]:
    """Whether this names a release, an act or a model. Raises ConfigError when it names nothing here."""
    for root, kind in (("releases", "release"), ("acts", "act")):
        try:
            Journal(store, what, root=root)
        except ConfigError:
            break
        if store.list(f"{root}/{what}/"):
            return kind, {}
    try:
        pointer_key(what)
    except EvidenceError:
        raise _unknown(store, what) from None
    if not store.list(f"models/{what}/"):
        raise _unknown(store, what)
    return "model", {"model": what}


def _unknown(store: ObjectStore, what: str) -> ConfigError:
    models = sorted({key.split("/")[1] for key in store.list("models/")})
    return ConfigError(
        f"there is no release, act or model '{what[:120]}' in this store, so nothing was verified. Models: {', '.join(models) or 'none'}; "
        "`seatrial show` lists releases."
    )


def _release(look: _Look, release_id: str) -> str:
    entries = _journal(look, release_id, "releases")
    for entry in entries:
        if entry.kind == "gate":
            _attempt(look, release_id, entry)
        if entry.kind in _SAID:
            _said(look, release_id, entry)
    decided = [entry for entry in entries if entry.kind == "decision"]
    if decided:
        return _decision(look, release_id, decided[-1], entries)
    if any(entry.kind == "decided" for entry in entries):
        look.broken("decision", "", f"release {release_id} ended, but no signed decision is in its journal. {RESTORE}.")
    last = entries[-1].kind if entries else "none"
    return f"release {release_id} decided nothing yet (its last record is '{last}'); all that it left so far verifies"


def _journal(look: _Look, name: str, root: str) -> Sequence[Entry]:
    with look.looking("journal"):
        entries = Journal(look.store, name, root=root).records()
        look.holds("journal", entries[-1].sha256 if entries else "", f"{len(entries)} records, each bound to the one before")
        return entries
    return ()


def _attempt(look: _Look, release_id: str, entry: Entry) -> None:
    gate, attempt = str(entry.payload["gate"]), entry.payload.get("attempt", "?")
    name = f"gate {gate}, attempt {attempt}"
    link = {key: str(entry.payload.get(key, "")) for key in ("evidence", "attestation", "outcome")}
    with look.looking(name, link["evidence"]):
        if not link["attestation"]:
            raise EvidenceError(f"this attempt was never signed. It shows nothing. Run `seatrial gate {gate} --release {release_id}`.")
        verdict, said = gate_link(look.notary, look.store, gate, link, release_id, naming=nullcontext())
        look.holds(name, link["evidence"], f"{verdict.outcome}, signed by {said.signed_by}")


def _said(look: _Look, release_id: str, entry: Entry) -> None:
    """A waiver or an approval in the journal, whether or not the decision rests on it."""
    sha256 = str(entry.payload["attestation"])
    with look.looking(entry.kind, sha256):
        said = look.notary.read(sha256, _SAID[entry.kind])
        if said.predicate["release_id"] != release_id:
            raise EvidenceError(
                f"it is about release {said.predicate['release_id']}, so it was copied here. It counts for nothing. {RESTORE}."
            )
        look.holds(entry.kind, sha256, f"by {said.predicate['by']}, signed by {said.signed_by}: {said.predicate['reason']}")


def _decision(look: _Look, release_id: str, entry: Entry, entries: Sequence[Entry]) -> str:
    sha256, recorded = str(entry.payload["attestation"]), str(entry.payload["decision"]["decision"])
    proof = look.proven("decision", sha256)
    with look.looking("decision", sha256):
        if proof is not None and (proof.kind, proof.release_id, proof.decision) != ("decision", release_id, recorded):
            raise EvidenceError(
                f"the journal says '{recorded}', but the signed {proof.kind} is '{proof.decision}' of {proof.release_id}. One of the two "
                f"is not what was decided. {RESTORE}."
            )
    if report := entry.payload.get("report"):
        with look.looking("report", report):
            get_evidence(look.store, report)
            look.holds("report", report, "the report's content is as it was kept")
    ended = [item for item in entries if item.kind in ("decided", "abandoned") and item.sequence > entry.sequence]
    state = "" if ended else f"; it is not carried out yet: `seatrial finish {release_id}`"
    if proof is None:
        return ""
    look.notes += _serving_words(look.store, proof)
    return f"release {release_id}: {recorded}, signed by {proof.signed_by}; everything behind it verifies{state}"


def _serving_words(store: ObjectStore, proof: Proof) -> list[str]:
    """Whether what a release promoted serves now."""
    if proof.decision != "promoted":
        return []
    try:
        pointer, _ = read_pointer(store, proof.model)
    except EvidenceError:
        return [f"the pointer of {proof.model} cannot be read: `seatrial verify {proof.model}`"]
    if pointer is not None and pointer.serving_version == proof.version:
        return [f"{proof.model} version {proof.version} serves"]
    return [f"{proof.model} version {proof.version} does not serve now"]


def _act(look: _Look, act_id: str) -> str:
    entries = _journal(look, act_id, "acts")
    steps = entries[0].payload.get("steps", ()) if entries else ()
    for pointer in [step["plan"]["pointer"] for step in steps if "pointer" in step.get("plan", {})]:
        proof = look.proven("statement", str(pointer["attestation"]))
        if proof is not None and (proof.release_id, proof.version) != (act_id, pointer["serving_version"]):
            look.broken(
                "statement", proof.attestation, f"it is of {proof.release_id} and version {proof.version}, not of this act. {RESTORE}."
            )
    state = "finished" if any(entry.kind == "finished" for entry in entries) else "not finished: run `seatrial reconcile`"
    return f"act {act_id} ({entries[0].payload.get('act', '') if entries else ''}), {state}; everything behind it verifies"


def _model(look: _Look, model: str) -> str:
    pointer = None
    with look.looking("pointer"):
        pointer, _ = read_pointer(look.store, model)
        if pointer is None:
            raise EvidenceError(f"the serving pointer of {model} is gone. What serves cannot be told. Run `seatrial reconcile {model}`.")
        look.holds("pointer", "", f"version {pointer.serving_version} serves as {pointer.serving_kind}, by {pointer.release_id}")
    if pointer is None:
        return ""
    registry = _registry(look)
    proof = _serving(look, pointer, registry)
    for role, version in (("last known-good", pointer.last_known_good), ("baseline", pointer.baseline)):
        if version not in ("", pointer.serving_version):
            with look.looking(role):
                _admitted(look, role, model, version, registry)
    if registry is not None:
        _aliases(look, pointer, registry)
    by = f", signed by {proof.signed_by}" if proof else ""
    return (
        f"{model} version {pointer.serving_version} serves as {pointer.serving_kind}, by {pointer.release_id}{by}; all behind it verifies"
    )


def _registry(look: _Look) -> Registry | None:
    with look.looking("registry"):
        return Registry(look.settings)
    return None


def _files(look: _Look, role: str, model: str, version: str, registry: Registry | None) -> str | None:
    """sha256 of a version's files as they lie in the registry now; None when that cannot be told, which is a broken link."""
    if registry is not None:
        with look.looking(f"{role}: model files"):
            return registry.files(model, version)
    return None


def _serving(look: _Look, pointer: Pointer, registry: Registry | None) -> Proof | None:
    """What serves: the pointer's statement with all it rests on, and the history of whoever moved the pointer."""
    model, version = pointer.model, pointer.serving_version
    proof = look.proven("serving", pointer.attestation, _files(look, "serving", model, version, registry))
    if proof is None:
        return None
    with look.looking("serving", proof.attestation):
        if (proof.model, proof.version) != (model, version):
            raise _not_this(f"the pointer serves {model} version {version}, its statement is about {proof.model} version {proof.version}")
        own = proof.kind == "rollback" or pointer.serving_kind == "candidate"
        if own and proof.release_id != pointer.release_id:
            raise _not_this(f"the pointer is of {pointer.release_id}, its statement is of {proof.release_id}")
        if not admission(look.store, model, version):
            raise _not_this(f"no admission of {model} version {version} stands in the store")
    if not _journal(look, pointer.release_id, "acts" if proof.kind == "rollback" else "releases"):
        look.broken("journal", "", f"the history of {pointer.release_id}, which moved the pointer, is gone. {RESTORE}.")
    rests_on = {"waivers": [item.attestation for item in proof.waivers]}  # of its admission, when a rollback put it in service
    look.notes += [f"{model} version {version} {words}" for words in lapsed(rests_on, proof.waivers, utc_now())]
    return proof


def _admitted(look: _Look, role: str, model: str, version: str, registry: Registry | None) -> None:
    """A version to fall back to: what let it serve before, and its files."""
    sha256 = admission(look.store, model, version)
    if not sha256:
        raise _not_this(f"{model} version {version} is named as {role}, but no release ever let it serve")
    proof = look.proven(role, sha256, _files(look, role, model, version, registry))
    if proof is not None and (proof.model, proof.version) != (model, version):
        raise _not_this(f"the admission of {model} version {version} is about {proof.model} version {proof.version}")


def _aliases(look: _Look, pointer: Pointer, registry: Registry) -> None:
    """The registry's view of the pointer."""
    with look.looking("aliases"):
        wanted, present = pointer_aliases(pointer), registry.aliases(pointer.model)
        for alias in ALIASES:
            if wanted.get(alias) != present.get(alias):
                found, right = present.get(alias, "nothing"), wanted.get(alias, "nothing")
                mend = "Nobody is served by an alias, but whoever reads it is misled. `seatrial reconcile` mends it"
                look.broken("aliases", "", f"alias '{alias}' names {found}, the pointer says {right}. {mend}.")
        if wanted == present:
            look.holds("aliases", "", ", ".join(f"{alias} {version}" for alias, version in sorted(present.items())))


def _not_this(problem: str) -> EvidenceError:
    return EvidenceError(f"{problem}. This does not show that it may serve. {RESTORE}.")

"""The reconciler: registry and evidence against the serving pointer, and what differs mended as an act that anybody can finish.

finish what acts left open -> gather -> validation.reconcile -> an act: pointer, aliases, pages -> say what is left for a person
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.tasks import task

from flows.acts import Change, Current, Desk, Say, Step, begin, current, finish_open_acts, move_step, new_act, open_desk
from flows.admissions import known_models, pointer_problem, read_admission
from flows.reconcile_facts import dead_releases, gather
from flows.rollback import pointer_words, refusal
from flows.surroundings import make_quiet_place
from infra.markdown import safe
from infra.pointer import Pointer, ServingKind
from infra.settings import Settings
from validation.errors import ConfigError
from validation.reconcile import Difference, after_moves
from validation.reconcile import reconcile as differences_of

IN_STEP, MENDED, DIFFERS, NEEDS_PERSON = "in_step", "mended", "differs", "needs_person"
STATES = {IN_STEP: "In step", MENDED: "Mended", DIFFERS: "Differs", NEEDS_PERSON: "Needs a person"}
COLUMNS = ("model", "kind", "subject", "found", "wanted", "repair", "words")


@dataclass
class _Told:
    """What is known of one model, filled in as it is found."""

    model: str
    differences: list[Difference] = field(default_factory=list)
    state: str = IN_STEP
    act_id: str = ""
    notes: list[str] = field(default_factory=list)


def reconcile_models(settings: Settings, *, say: Say, models: Sequence[str] = (), dry_run: bool = False) -> dict[str, Any]:
    """Compare registry and pointer of these models (default: all), and mend what differs. The command `seatrial reconcile`.

    Raises: ConfigError for an unknown model.
    """
    desk = open_desk(settings, say)
    known = known_models(desk.store)
    if unknown := sorted(set(models) - set(known)):
        raise ConfigError(
            f"there is no model {', '.join(repr(name[:80]) for name in unknown)} in this store, so nothing was compared. Models: "
            f"{', '.join(known) or 'none'}."
        )
    told = [reconcile_model(desk, model, dry_run=dry_run) for model in dict.fromkeys(models or known)]
    return {"ok": all(item["state"] != NEEDS_PERSON for item in told), "dry_run": dry_run, "models": told}


@flow(name="reconcile", persist_result=False)
def reconcile(models: list[str] | None = None, dry_run: bool = False) -> Any:
    """Compare registry and pointer of these models (default: all that serve) and mend what differs; `dry_run` only says it."""
    document = comparison(models or [], dry_run)
    show(document)
    worst = max((item["state"] for item in document["models"]), key=list(STATES).index, default=IN_STEP)
    return _state(document, worst)


@task(task_run_name="compare and mend", cache_policy=NO_CACHE, persist_result=False)
def comparison(models: list[str], dry_run: bool) -> dict[str, Any]:
    """The document; read anew each time."""
    from prefect import get_run_logger

    return reconcile_models(make_quiet_place(), say=get_run_logger().info, models=models, dry_run=dry_run)


def show(document: dict[str, Any]) -> None:
    """The differences on the flow run's page."""
    rows = [{name: row[name] for name in COLUMNS} for item in document["models"] for row in item["differences"]]
    create_table_artifact(key="reconcile-differences", table=rows, description=f"{len(rows)} differences")
    create_markdown_artifact(
        key="reconcile", markdown="\n".join(f"- {safe(line)}" for line in lines(document)), description=f"{len(rows)} differences"
    )


def lines(document: dict[str, Any]) -> list[str]:
    """A reconciliation for people."""
    told = []
    for item in document["models"]:
        told.append(f"{item['model']}: {STATES[item['state']].lower()}" + (f", act {item['act_id']}" if item["act_id"] else ""))
        told += [f"  {row['repair'].replace('_', ' ')}: {row['words']}" for row in item["differences"]]
        told += [f"  {note}" for note in item["notes"]]
    return told or ["no model serves from this store"]


def reconcile_model(desk: Desk, model: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Compare one model and mend it; {model, differences, state, act_id, notes}."""
    told = _Told(model)
    left_open = [] if dry_run else finish_open_acts(desk, model)
    told.notes += [f"act {item['act_id']} {item['words']}" for item in left_open]
    before = current(desk.store, model)
    if before.pointer is None:
        kind = "pointer_unreadable" if before.body_sha256 else "pointer_missing"
        words = pointer_words(desk, model, before)
        told.differences.append(
            Difference(kind=kind, model=model, subject="pointer", found="", wanted="", words=words, repair="report_only", needs_person=True)
        )
    else:
        told.differences = _went_back(desk, before) or _judged(desk, before.pointer)
        told.differences += _unsigned(desk, before.pointer, told.differences)
        steps = [item for item in told.differences if item.repair != "report_only"]
        if steps:
            told.state = DIFFERS
        if steps and not dry_run:
            _mend(desk, told, before, before.pointer)
    told.notes += [item["words"] for item in dead_releases(desk.store, model)]
    if any(item.needs_person for item in told.differences) or not all(item["ok"] for item in left_open):
        told.state = NEEDS_PERSON
    for item in told.differences:
        desk.say(f"{model}: {item.words}")
    return asdict(told)


def _judged(desk: Desk, pointer: Pointer) -> list[Difference]:
    """The differences; a version that would be put in service is tried first, and passed over when it does not answer."""
    silent: dict[str, str] = {}
    tried: set[str] = set()
    while True:
        facts = gather(desk, pointer, silent)
        found = differences_of(pointer, facts.view, facts.admitted, moved_alias=facts.policy.reconcile.moved_alias)
        moves = [item.version for item in found if item.repair in ("roll_back_to", "adopt") and item.version not in tried]
        if not moves:
            return list(found)
        for version in moves:
            tried.add(version)
            if problem := refusal(desk, pointer.model, read_admission(desk.notary, desk.store, pointer.model, version)):
                silent[version] = problem


def _went_back(desk: Desk, before: Current) -> list[Difference]:
    """A pointer that is older than what the aliases once followed: the store was put back from a backup, and what served since is lost."""
    pointer, mirrored = before.pointer, desk.registry.mirrored(before.pointer.model if before.pointer else "")
    if pointer is None or mirrored.sequence <= pointer.sequence or current(desk.store, pointer.model) != before:
        return []  # or it moved on while we looked
    served = mirrored.after.get("champion", "")
    words = (
        f"the pointer names version {pointer.serving_version} as its move {pointer.sequence}, but the registry followed move "
        f"{mirrored.sequence}, to version {served}: the store is older than the registry, perhaps a backup. It is never guessed which is "
        f'right. Restore a newer store, or say what has to serve: `seatrial rollback {pointer.model} --to VERSION --reason "..."`'
    )
    return [
        Difference(
            kind="pointer_older", model=pointer.model, subject="pointer", found=pointer.serving_version, wanted=served, words=words,
            repair="report_only", needs_person=True,
        )
    ]  # fmt: skip


def _unsigned(desk: Desk, pointer: Pointer, found: Sequence[Difference]) -> list[Difference]:
    """A pointer that was edited by hand, or is from before statements were signed. A move signs anew; nothing else here does."""
    if after_moves(pointer, tuple(found))[2] or not (problem := pointer_problem(desk.notary, desk.store, pointer)):
        return []
    version = pointer.serving_version
    words = (
        f"the pointer names version {version}, but not by a signed word: {problem}. If that version is to serve, "
        f'`seatrial rollback {pointer.model} --to {version} --reason "..."` signs for it; else name another one'
    )
    return [
        Difference(
            kind="pointer_not_signed",
            model=pointer.model,
            subject="pointer",
            found=pointer.attestation,
            wanted="",
            words=words,
            repair="report_only",
            needs_person=True,
        )
    ]


def _mend(desk: Desk, told: _Told, before: Current, pointer: Pointer) -> None:
    journal = new_act(desk.store, told.model)
    steps = [*_move(desk, journal.release_id, before, pointer, told.differences), {"effect": "mirror", "plan": {}}]
    steps += [step for item in told.differences for step in _page(desk, item)]
    results = begin(desk, journal, "reconcile", steps, model=told.model, by="reconcile", reason="", differences=told.differences)
    told.act_id, told.state = journal.release_id, MENDED
    if (other := results.get("overtaken")) and other.get("why"):
        told.notes.append(f"the pointer was not moved: {other['why']}")
    elif other:
        told.notes.append(
            f"overtaken: {other['by'] or 'somebody'} moved the pointer meanwhile, so it was left to them; the aliases follow what serves"
        )


def _move(desk: Desk, act_id: str, before: Current, pointer: Pointer, found: Sequence[Difference]) -> list[Step]:
    """The step that moves the pointer, and none when it may stay."""
    serving, good, moves = after_moves(pointer, tuple(found))
    if not moves:
        return []
    why = "; ".join(item.words for item in found if item.repair in ("roll_back_to", "adopt", "drop_last_known_good"))
    kind: ServingKind = pointer.serving_kind
    if serving != pointer.serving_version:
        kind = "baseline" if serving == pointer.baseline else "last_known_good"
    change = Change(
        act_id=act_id, proof=read_admission(desk.notary, desk.store, pointer.model, serving), kind=kind, last_known_good=good,
        baseline=pointer.baseline, sequence=pointer.sequence + 1, from_version=pointer.serving_version, by="reconcile", reason=why,
    )  # fmt: skip
    return [move_step(desk, pointer.model, before, change)]


def _page(desk: Desk, item: Difference) -> list[Step]:
    """The step that mends what a version's page says."""
    plan = {"version": item.version}
    if item.repair == "set_tag":
        return [{"effect": "tag", "plan": plan | {"tag": item.tag, "value": item.wanted}}]
    if item.repair == "roll_back_to" and item.found != "":
        return [{"effect": "mark", "plan": {"version": item.found, "status": "rolled_back", "reason": item.words}, "if_moved": True}]
    if item.repair == "mark_abandoned":
        return [{"effect": "mark", "plan": plan | {"status": "abandoned", "reason": item.words}}]
    if item.repair == "describe":
        return [{"effect": "describe", "plan": plan | {"text": _description(desk, item)}}]
    return []


def _description(desk: Desk, item: Difference) -> str:
    """The text of the version's run, which `publish` wrote there too; else who let it through."""
    proof = read_admission(desk.notary, desk.store, item.model, item.version)
    if proof.kind == "baseline":
        return f"Baseline: the simple model that serves while no verified candidate can. Let through by {proof.release_id}."
    page = next(page for page in desk.registry.pages(item.model) if page.version == item.version)
    note = desk.registry.run_tags(page.run_id).get("mlflow.note.content", "") if page.run_id else ""
    return note or f"Promoted by {proof.release_id}; `seatrial show {proof.release_id}` has the whole story."


def _state(document: dict[str, Any], worst: str) -> State[Any]:
    counted = sum(len(item["differences"]) for item in document["models"])
    message = f"{len(document['models'])} models compared, {counted} differences"
    if document["ok"]:
        return Completed(name=STATES[worst], message=message, data=document)
    return Failed(name=STATES[worst], message=message, data=document)

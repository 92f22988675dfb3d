"""Going back: a version that was let through before serves again, by a signed statement and an act that anybody can finish.

    choose a version -> verify what let it through -> it loads and answers -> sign -> started, pointer, aliases, marks, finished

Nothing of the recipe's code is needed: a model answers the example that it was registered with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.acts import Change, Current, Desk, Say, Step, begin, current, finish_open_acts, move_step, new_act, open_desk, user
from flows.admissions import Proof, admitted_versions, known_models, pointer_problem, read_admission, verified
from flows.people import NAME_CHARS, one_line
from flows.surroundings import make_quiet_place
from infra.export import version_uri
from infra.markdown import safe
from infra.pointer import Pointer, ServingKind
from infra.registry import mirror_current
from infra.settings import Settings
from trainer import ranks
from validation.errors import ConfigError, EvidenceError, ReleaseError

ANSWER_DEADLINE_S = 120.0  # a model that was exported answers two rows within a second; fetching it may take longer
ANSWERING = ("mlflow.pytorch", "mlflow.pyfunc")  # what a warm process imports meanwhile
REASON_LIMIT = 2000  # characters; it stands in a tag of the registry

_LEFT = ("rolled_back", "abandoned", "refused")
_OUTCOMES = {
    "rolled_back": "Rolled back",
    "already": "Already there",
    "finished": "Finished",
    "overtaken": "Overtaken",
    "refused": "Refused",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for."""

    model: str
    reason: str
    by: str
    version: str = ""  # "" = last known-good, else the baseline
    leaving: str = ""  # only if this version serves now; "" = whichever does


def roll_back(settings: Settings, *, say: Say, model: str, version: str = "", by: str = "", reason: str) -> dict[str, Any]:
    """Put an earlier verified version in service. The command `seatrial rollback`.

    Raises: ConfigError when the model is unknown or the version was never let through; EvidenceError when the version does not verify.
    """
    said, name = one_line("reason", reason, REASON_LIMIT), one_line("name", by or user(), NAME_CHARS)
    return carry_out_rollback(open_desk(settings, say), Request(model=model, reason=said, by=name, version=version))


def fall_back(
    settings: Settings, model: str, reason: str, by: str = "monitor", to: str = "", leaving: str = "", say: Say = lambda _: None
) -> dict[str, Any]:
    """As `roll_back`, for who watches what serves.

    Args: leaving, the version that was found bad: when another one serves by now, nothing is done.
    """
    return carry_out_rollback(open_desk(settings, say), Request(model=model, reason=reason, by=by, version=to, leaving=leaving))


@flow(name="rollback", flow_run_name="rollback {model}", persist_result=False)
def rollback(model: str, reason: str, version: str = "", by: str = "") -> Any:
    """Put an earlier verified version in service: last known-good, else the baseline, or `version`. `by` is who says so."""
    from prefect import get_run_logger

    document = roll_back(make_quiet_place(), say=get_run_logger().info, model=model, version=version, by=by, reason=reason)
    create_markdown_artifact(key="rollback", markdown="\n\n".join(map(safe, lines(document))), description=document["words"])
    name = _OUTCOMES[document["outcome"]]
    return _state(document, name)


def lines(document: dict[str, Any]) -> list[str]:
    """A rollback for people."""
    told = [document["words"], *document["tried"], *document["finished"]]
    if document["act_id"]:
        told.append(f"act {document['act_id']}, by {document['by']}: {document['reason']}")
    return told


def carry_out_rollback(desk: Desk, request: Request) -> dict[str, Any]:
    """Roll back, or say why nothing was moved. What acts on this model left open is finished first."""
    _check(desk, request)
    asked = current(desk.store, request.model)
    told = finish_open_acts(desk, request.model)
    answer = _Answer(request, tuple(f"act {item['act_id']} {item['words']}" for item in told))
    before = current(desk.store, request.model)
    now = before.pointer
    if now is None:
        return _rebuilt(desk, answer, before)
    if now.release_id in {item["act_id"] for item in told} and not (request.version or request.leaving):
        words = (
            f"{request.model} version {now.serving_version} serves by act {now.release_id}, which somebody had begun and is finished now"
        )
        return answer.document("finished", f"{words}. If that version has to leave too, run the command again", pointer=now)
    leaving = request.leaving or (asked.pointer.serving_version if asked.pointer else "")
    if now.serving_version != leaving and (request.leaving or not request.version):
        words = f"{request.model} version {leaving} does not serve any more: version {now.serving_version} does, by {now.release_id}"
        return answer.document("overtaken", f"{words}. Nothing more was done", pointer=now)
    if request.version == now.serving_version and not pointer_problem(desk.notary, desk.store, now):
        mirror_current(desk.registry, desk.store, request.model)
        return answer.document("already", f"{request.model} version {now.serving_version} serves already, by {now.release_id}", pointer=now)
    ranks.warm_up(when_idle=ANSWERING)
    return _moved(desk, answer, before, now)


@dataclass(frozen=True, slots=True)
class _Answer:
    request: Request
    finished: tuple[str, ...]

    def document(
        self, outcome: str, words: str, *, pointer: Pointer | None, act_id: str = "", left: str = "", tried: Sequence[str] = ()
    ) -> dict[str, Any]:
        serving = {"version": pointer.serving_version, "kind": pointer.serving_kind} if pointer else {"version": "", "kind": "none"}
        return {
            "ok": outcome in ("rolled_back", "already", "finished"), "outcome": outcome, "model": self.request.model, "words": words,
            "act_id": act_id, "serving": serving, "from_version": left, "reason": self.request.reason, "by": self.request.by,
            "tried": list(tried), "finished": list(self.finished),
        }  # fmt: skip


def _check(desk: Desk, request: Request) -> None:
    if not request.reason.strip() or len(request.reason) > REASON_LIMIT:
        raise ConfigError(
            f"a rollback needs a reason of 1 to {REASON_LIMIT} characters, got {len(request.reason.strip())}. Nothing was changed. Give "
            "--reason: it is signed, and read by whoever asks later why this version serves."
        )
    if request.version and not (request.version.isascii() and request.version.isdecimal()):
        raise ConfigError(
            f"{request.version[:80]!r} is not a version: versions are whole numbers. Nothing was changed. See `seatrial show`."
        )
    models = known_models(desk.store)
    if request.model not in models:
        raise ConfigError(
            f"there is no model '{request.model[:80]}' in this store, so nothing was changed. Models: {', '.join(models) or 'none'}."
        )
    if request.version:
        read_admission(desk.notary, desk.store, request.model, request.version)


def _moved(desk: Desk, answer: _Answer, before: Current, now: Pointer) -> dict[str, Any]:
    request = answer.request
    proof, tried = _chosen(desk, request, now)
    if proof is None:
        words = f"{request.model} version {now.serving_version} still serves: there is nothing verified to go back to"
        return answer.document("refused", words, pointer=now, tried=tried)
    journal = new_act(desk.store, request.model)
    left = now.serving_version
    kept = now.last_known_good not in (left, proof.version) and request.version  # passed over just now, it is good no longer
    good = now.last_known_good if kept else ""
    change = Change(
        act_id=journal.release_id, proof=proof, kind=now.serving_kind if proof.version == left else _kind(proof, now.baseline),
        last_known_good=good, baseline=now.baseline, sequence=now.sequence + 1, from_version=left, by=request.by, reason=request.reason,
    )  # fmt: skip
    steps = [move_step(desk, request.model, before, change), {"effect": "mirror", "plan": {}}, *_marks(change, now)]
    results = begin(desk, journal, "rollback", steps, model=request.model, by=request.by, reason=request.reason)
    return _told(desk, answer, change, results, tried)


def _told(desk: Desk, answer: _Answer, change: Change, results: dict[str, Any], tried: Sequence[str]) -> dict[str, Any]:
    model, version = answer.request.model, change.proof.version
    pointer = current(desk.store, model).pointer
    if results["moved"]:
        words = (
            f"{model} version {version} ({change.kind.replace('_', ' ')}) serves instead of {change.from_version or 'none that was known'}"
        )
        words += f"; it was let through by {change.proof.release_id}, signed by {change.proof.signed_by}"
        return answer.document("rolled_back", words, pointer=pointer, act_id=change.act_id, left=change.from_version, tried=tried)
    other = results["overtaken"]
    if other.get("why"):
        words = f"{model} version {version} may not serve any more, so nothing was moved: {other['why']}"
        return answer.document("refused", words, pointer=pointer, act_id=change.act_id, tried=tried)
    outcome = "already" if other["version"] == version else "overtaken"
    words = f"overtaken: {other['by'] or 'somebody'} moved the pointer meanwhile, and {model} version {other['version'] or '(none)'} serves"
    return answer.document(
        outcome, f"{words}. This act changed nothing; run it again if that version has to leave too", pointer=pointer, act_id=change.act_id,
        tried=tried,
    )  # fmt: skip


def _chosen(desk: Desk, request: Request, now: Pointer) -> tuple[Proof | None, list[str]]:
    """The version to go back to, proven and tried, and why others were passed over. A version asked for by number is that or an error."""
    if request.version:
        proof = verified(desk.notary, desk.store, desk.registry, request.model, request.version)
        if problem := refusal(desk, request.model, proof):
            raise EvidenceError(
                f"{request.model} version {request.version} verifies but does not answer ({problem}). Version {now.serving_version} still "
                "serves. Name another version with --to."
            )
        return proof, []
    tried: list[str] = []
    statuses = {page.version: page.status for page in desk.registry.pages(request.model)}
    for version in dict.fromkeys((now.last_known_good, now.baseline)):
        if version in ("", now.serving_version):
            continue
        try:
            proof = verified(desk.notary, desk.store, desk.registry, request.model, version)
        except ReleaseError as error:
            tried.append(f"version {version} cannot take over: {error}")
            continue
        problem = f"it was taken out of service before ({statuses[version]})" if statuses.get(version) in _LEFT else ""
        problem = problem or refusal(desk, request.model, proof)
        if not problem:
            return proof, tried
        tried.append(f"version {version} cannot take over: {problem}")
    return None, tried


def refusal(desk: Desk, model: str, proof: Proof) -> str:
    """Why a proven version does not load or answer, in a process of its own; "" when it does."""
    try:
        ranks.call(
            "infra.export:load_and_answer", version_uri(model, proof.version), sha256=proof.files_sha256,
            tracking_uri=desk.registry.tracking_uri, deadline_s=ANSWER_DEADLINE_S,
        )  # fmt: skip
    except Exception as error:  # whatever a model raises, it does not serve
        return f"{type(error).__name__}: {error}"
    return ""


def _kind(proof: Proof, baseline: str) -> ServingKind:
    return "baseline" if proof.version == baseline else "last_known_good"


def _marks(change: Change, now: Pointer) -> list[Step]:
    """What the pages say afterwards; the baseline stays the baseline."""
    steps: list[Step] = [return_step(change.proof, change.reason)]
    if change.from_version not in ("", now.baseline, change.proof.version):
        plan = {"version": change.from_version, "status": "rolled_back", "reason": change.reason}
        steps.append({"effect": "mark", "plan": plan, "if_moved": True})
    return steps


def return_step(proof: Proof, reason: str) -> Step:
    """The step that takes an earlier "rolled back" off the page of a version that serves again."""
    status = "baseline" if proof.kind == "baseline" else "promoted"
    return {"effect": "return", "plan": {"version": proof.version, "status": status, "reason": reason}, "if_moved": True}


def _rebuilt(desk: Desk, answer: _Answer, before: Current) -> dict[str, Any]:
    """Write a pointer that is gone or unreadable anew, for a version that a person names."""
    request = answer.request
    if not request.version:
        raise EvidenceError(pointer_words(desk, request.model, before))
    proof, _ = _chosen(desk, request, _NOBODY)
    assert proof is not None
    journal = new_act(desk.store, request.model)
    baseline = named_baseline(desk, request.model)
    change = Change(
        act_id=journal.release_id, proof=proof, kind=_kind(proof, baseline), last_known_good="", baseline=baseline,
        sequence=desk.registry.mirrored(request.model).sequence + 1, from_version="", by=request.by, reason=request.reason,
    )  # fmt: skip
    steps = [move_step(desk, request.model, before, change), {"effect": "mirror", "plan": {}}, return_step(proof, request.reason)]
    results = begin(desk, journal, "rollback", steps, model=request.model, by=request.by, reason=request.reason)
    return _told(desk, answer, change, results, ())


_NOBODY = Pointer(
    model="", serving_version="", serving_kind="baseline", last_known_good="", baseline="", release_id="", sequence=1
)  # fmt: skip


def named_baseline(desk: Desk, model: str) -> str:
    """The newest version that was let through as the baseline, verified; "" when there is none."""
    for version in admitted_versions(desk.store, model):
        try:
            if read_admission(desk.notary, desk.store, model, version).kind == "baseline":
                return version
        except ReleaseError:
            continue
    return ""


def pointer_words(desk: Desk, model: str, found: Current) -> str:
    """What to do about a pointer that is gone or cannot be read: the exact command, never a guess at what served."""
    proven = []
    for version in admitted_versions(desk.store, model):
        try:
            proven.append(read_admission(desk.notary, desk.store, model, version).version)
        except ReleaseError:
            continue
    last = desk.registry.mirrored(model).after.get("champion", "")
    hint = f" (the registry last showed {last})" if last in proven else ""
    state = f"cannot be read: {found.problem}" if found.body_sha256 else f"is gone: there is no object models/{model}/pointer."
    if not proven:
        return f"the serving pointer of {model} {state} No version of it verifies either, so nothing may serve. Release again."
    return (
        f"the serving pointer of {model} {state} It is never guessed. Versions that verify: {', '.join(proven)}{hint}. Put one in service: "
        f'`seatrial rollback {model} --to {last if last in proven else proven[0]} --reason "..."`.'
    )


def _state(document: dict[str, Any], name: str) -> State[Any]:
    if document["ok"]:
        return Completed(name=name, message=document["words"], data=document)
    return Failed(name=name, message=document["words"], data=document)

"""What people may say about a release: a waiver of one gate's very evidence, a yes or no to the whole; both bind digests and expire.

Waiver    lets one gate that did not pass count as a conditional pass; only for gates that the policy calls waivable
Approval  a person's yes or no to one basis: candidate, every gate's evidence, every waiver
People    both, and the rules and the time by which they count
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from validation.canonical import canonical_json, digest
from validation.errors import EvidenceError
from validation.policy import DecisionPolicy

DAY_S = 86_400.0
SKEW_S = 60.0  # clocks of two machines differ; further ahead than this is a clock that jumped
State = Literal["none", "waiting", "approved", "refused", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """A named person takes the risk of one gate that did not pass, for a while."""

    gate: str
    by: str
    reason: str
    made_at: str  # ISO 8601 with its zone, as all times here
    expires_at: str
    evidence: str  # sha256 of the very gate evidence that is waived
    attestation: str = ""  # sha256 of the signed statement; "" never counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A named person's yes or no to one basis."""

    by: str
    reason: str
    approved: bool
    requested_at: str  # since when this person was waited for
    made_at: str
    expires_at: str  # until when a yes may be used
    basis: str  # `approval_basis` of what was approved
    attestation: str = ""  # sha256 of the signed statement; "" never counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where an approval stands."""

    state: State
    words: str  # the state as a clause; "" when nobody has to be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """What people said about a release, with the rules and the time by which it counts."""

    policy: DecisionPolicy  # the release's own
    now: str
    release_id: str
    evidence: Mapping[str, str]  # gate -> sha256 of the evidence that its verdict was read from
    basis: str = ""  # `approval_basis` of this release as it stands
    waivers: tuple[Waiver, ...] = ()
    approval: Approval | None = None  # the latest for this basis
    requested_at: str = ""  # since when somebody is asked; "" = not yet
    serving_kind: str = ""  # what serves while a person is waited for; "" = the first fallback that answers
    serving_version: str = ""

    @property
    def counting(self) -> tuple[Waiver, ...]:
        """The waivers that count, one a gate."""
        return counting(self.waivers, evidence=self.evidence, policy=self.policy, now=self.now)


def parse_waiver(predicate: Mapping[str, Any], attestation: str) -> Waiver:
    """Read a signed statement's waiver. Raises EvidenceError when it is none."""
    return _parsed(_WAIVER, Waiver, predicate, attestation)


def parse_approval(predicate: Mapping[str, Any], attestation: str) -> Approval:
    """Read a signed statement's approval. Raises EvidenceError when it is none."""
    return _parsed(_APPROVAL, Approval, predicate, attestation)


def approval_basis(
    *, release_id: str, weights: str, gates: Mapping[str, Mapping[str, str]], waivers: Sequence[str] = ()
) -> str:  # fmt: skip
    """sha256 of what a person approves; whatever changes in it asks for a new yes.

    Args: weights, sha256 of the candidate's; gates, gate -> sha256 of its "evidence" and its "attestation"; waivers, their attestations.
    """
    bound = {gate: {"evidence": item.get("evidence", ""), "attestation": item.get("attestation", "")} for gate, item in gates.items()}
    return digest({"release_id": release_id, "weights": weights, "gates": bound, "waivers": sorted(waivers)})


def counting(waivers: Sequence[Waiver], *, evidence: Mapping[str, str], policy: DecisionPolicy, now: str) -> tuple[Waiver, ...]:
    """The waivers that count now, one a gate: of several the one that counts longest."""
    good = [item for item in waivers if not why_not(item, evidence=evidence, policy=policy, now=now)]
    return tuple({item.gate: item for item in sorted(good, key=lambda item: _time(item.expires_at))}.values())


def why_not(waiver: Waiver, *, evidence: Mapping[str, str], policy: DecisionPolicy, now: str) -> str:
    """Why a waiver does not count, as a clause; "" when it does."""
    made, expires, at = _time(waiver.made_at), _time(waiver.expires_at), _time(now)
    days = (expires - made) / DAY_S
    if waiver.gate not in policy.waivable:
        return f"the policy lets nobody waive {waiver.gate}"
    if not (waiver.by.strip() and waiver.reason.strip() and waiver.attestation):
        return "it has no name, no reason or no signature"
    if not waiver.evidence or waiver.evidence != evidence.get(waiver.gate):
        return f"{waiver.gate} was held again since, and it waives the evidence of then"
    if not math.isfinite(made + expires + at):
        return f"its times cannot be read ({waiver.made_at!r}, {waiver.expires_at!r}, now {now!r})"
    if made > at + SKEW_S:
        return f"it was made at {shown(waiver.made_at)}, which is still to come: a clock jumped"
    if not 0 < days <= policy.waiver_days.value + 1e-9:
        return f"it counts for {days:.3g} days, and the policy allows {policy.waiver_days.value:g}"
    return "" if at < expires else f"it expired on {shown(waiver.expires_at)}"


def standing(people: People) -> Standing:
    """Whether a person is waited for, and what was said. A no for this basis counts whatever the policy asks, and does not expire."""
    said = people.approval
    wrong = _not_of_this(said, people) if said is not None else ""
    if said is not None and not wrong and not said.approved:
        return Standing(state="refused", words=f"refused by {said.by} on {shown(said.made_at)}: {said.reason}")
    if not people.policy.approval:
        return Standing(state="none", words="")
    if said is None:
        return _asked(people)
    if wrong:
        return Standing(state="waiting", words=f"waits for a person: what {said.by} said does not count, since {wrong}")
    if not _time(people.now) < _time(said.expires_at):
        return Standing(
            state="expired", words=f"waits for a person: the approval by {said.by} expired on {shown(said.expires_at)}, unused"
        )  # fmt: skip
    return Standing(state="approved", words=f"approved by {said.by} on {shown(said.made_at)}: {said.reason}")


def _asked(people: People) -> Standing:
    """Nobody has answered: asked for the first time, waiting, or waiting for too long."""
    if not people.requested_at:
        return Standing(state="waiting", words="waits for a person")
    lapses = _time(people.requested_at) + people.policy.approval_days.value * DAY_S
    if _time(people.now) < lapses:
        return Standing(state="waiting", words=f"waits for a person since {shown(people.requested_at)}")
    days = f"{people.policy.approval_days.value:g} days"
    return Standing(state="expired", words=f"waits for a person: nobody answered within {days} from {shown(people.requested_at)}")


def _not_of_this(said: Approval, people: People) -> str:
    """Why an approval says nothing about this release as it stands; "" when it does. Its expiry is another question."""
    asked, made, expires, at = map(_time, (said.requested_at, said.made_at, said.expires_at, people.now))
    limit = people.policy.approval_days.value * DAY_S
    if not people.basis or said.basis != people.basis:
        return "the candidate, evidence or waivers changed after it"
    if not (said.by.strip() and said.reason.strip() and said.attestation):
        return "it has no name, no reason or no signature"
    if not math.isfinite(asked + made + expires + at):
        return f"its times cannot be read ({said.requested_at!r}, {said.made_at!r}, {said.expires_at!r})"
    if made > at + SKEW_S or made < asked - SKEW_S:
        return f"it was made at {shown(said.made_at)}, asked for at {shown(said.requested_at)}: a clock jumped"
    if made - asked > limit or not 0 < expires - made <= limit + 1.0:
        return f"the policy allows {people.policy.approval_days.value:g} days from the question to the yes, and from the yes to its use"
    return ""


def human_review_s(said: Approval) -> float:
    """Seconds from the question to the answer; NaN when a time cannot be read."""
    return max(0.0, elapsed) if math.isfinite(elapsed := _time(said.made_at) - _time(said.requested_at)) else math.nan


def lapsed(decision: Mapping[str, Any], waivers: Sequence[Waiver], now: str) -> tuple[str, ...]:
    """What is wrong with a serving version's waivers, one sentence each; none when it rests on none, or all still count.

    Args: decision, the signed decision's predicate, which lists the attestations of its waivers; waivers, those that were read back.
    """
    known = {item.attestation: item for item in waivers}
    at, problems = _time(now), []
    for sha256 in decision.get("waivers") or ():
        item = known.get(sha256)
        if item is None:
            problems.append(f"serves on a waiver that cannot be read back ({str(sha256)[:12]}…)")
        elif not at < _time(item.expires_at):
            problems.append(f"serves on a waiver that expired on {shown(item.expires_at)}: {item.gate}, waived by {item.by}: {item.reason}")
    return tuple(problems)


def expired(waivers: Sequence[Waiver], now: str) -> tuple[Waiver, ...]:
    """Those that do not count any more; one whose time cannot be read does not either."""
    return tuple(item for item in waivers if not _time(now) < _time(item.expires_at))


def shown(iso: str) -> str:
    """A time to the minute, UTC; other text as it is."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" if math.isfinite(at := _time(iso)) else iso


def _time(iso: str) -> float:
    """Seconds since 1970; NaN for what is no time with a zone, so that no comparison holds."""
    try:
        at = datetime.fromisoformat(iso)
    except (TypeError, ValueError):
        return math.nan
    return at.timestamp() if at.tzinfo is not None else math.nan


Said = TypeVar("Said", Waiver, Approval)
_WAIVER: TypeAdapter[Waiver] = TypeAdapter(Waiver)
_APPROVAL: TypeAdapter[Approval] = TypeAdapter(Approval)


def _parsed(adapter: TypeAdapter[Said], kind: type[Said], predicate: Mapping[str, Any], attestation: str) -> Said:
    given = {field.name: predicate.get(field.name) for field in fields(kind)} | {"attestation": attestation}
    try:
        return adapter.validate_json(canonical_json(given), strict=True)
    except ValidationError as error:
        problems = "; ".join(f"{item['loc'][0]}: {item['msg']}" for item in error.errors())
        raise EvidenceError(
            f"the signed statement {attestation[:12]}… is no {kind.__name__.lower()} ({problems}). It counts for nothing. Say it again "
            "with `seatrial waive` or `seatrial approve`."
        ) from None

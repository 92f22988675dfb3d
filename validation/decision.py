"""What becomes of a release: verdicts, fallbacks and what people said in, one decision out.

Nothing but a pass of every required gate promotes, or a waiver that counts in its place; and a person's yes where the policy asks for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from validation.records import FallbackCheck
from validation.verdict import GateVerdict, Outcome
from validation.waivers import People, Waiver, shown, standing, why_not

FALLBACK_ORDER: tuple[Literal["last_known_good", "baseline"], ...] = ("last_known_good", "baseline")
ServingKind = Literal["candidate", "last_known_good", "baseline", "none"]
SERVING_KINDS: tuple[ServingKind, ...] = get_args(ServingKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """The release's fate and what serves from now on."""

    decision: Literal["promoted", "fell_back", "held"]
    serving_kind: ServingKind
    serving_version: str  # "" when nothing verified can serve, or the candidate has no version yet
    reason: str  # every required gate that did not pass, in its own words
    action: str  # the first one's next step; "" when promoted without conditions
    conditions: tuple[str, ...] = ()  # gates that did not pass and were waived: by whom, until when, why, and what they said
    waits_for_person: bool = False  # everything else speaks for the candidate: ask, then decide again


def decide(
    *,
    verdicts: Sequence[GateVerdict],
    required: Sequence[str],
    fallbacks: Sequence[FallbackCheck],
    candidate_version: str = "",
    people: People | None = None,
) -> ReleaseDecision:
    """Promote when every required gate passed or is waived, and nobody has still to be asked; else fall back to the first that answered.

    A gate that is missing did not pass, nor did one whose control was missed; of several verdicts of one gate all have to pass.
    No required gate at all promotes nothing, nor does a waiver of all of them. Fallbacks are tried in the order last known-good, baseline,
    whatever their order here. Args: people, what was said and the rules for it; None: no waiver, and nobody has to be asked.
    """
    refusals, waived = _weighed(verdicts, required, people)
    if not required:
        refusals = [("no gate is required by the policy, so nothing speaks for the candidate", "name required gates in the policy")]
    elif not refusals and len(waived) == len(set(required)):
        refusals = [("every required gate is waived, so nothing speaks for the candidate", "mend one of them and hold it again")]
    conditions = tuple(_condition(verdict, waiver) for verdict, waiver in waived)
    if refusals:
        return replace(_refused(refusals, fallbacks), conditions=conditions)
    passed, action = _passed(required, waived, people)
    asked = standing(people) if people is not None else None
    if people is not None and asked is not None and asked.state in ("waiting", "expired"):
        return _waiting(people, fallbacks, f"{passed}; {asked.words}", conditions)
    if people is not None and asked is not None and asked.state == "refused":
        again = f"mend what it says and release again; `seatrial approve {people.release_id}` takes another word"
        return replace(_refused([(f"{asked.words} ({passed})", again)], fallbacks), conditions=conditions)
    return ReleaseDecision(
        decision="promoted", serving_kind="candidate", serving_version=candidate_version, action=action, conditions=conditions,
        reason=f"{passed}; {asked.words}" if asked is not None and asked.words else passed,
    )  # fmt: skip


def _weighed(
    verdicts: Sequence[GateVerdict], required: Sequence[str], people: People | None
) -> tuple[list[tuple[str, str]], list[tuple[GateVerdict, Waiver]]]:
    """Reason and action of every required gate that stands in the way, and the gates that are waived."""
    refusals, waived = [], []
    counting = {item.gate: item for item in people.counting} if people is not None else {}
    for gate in dict.fromkeys(required):
        refusal = _refusal(verdicts, gate)
        mine = [verdict for verdict in verdicts if verdict.gate == gate]
        if refusal is None:
            continue
        if gate in counting and len(mine) == 1:  # a waiver is of one gate's one evidence: what is missing cannot be waived
            waived.append((mine[0], counting[gate]))
        else:
            refusals.append((refusal[0] + _uncounted(gate, people), refusal[1]))
    return refusals, waived


def _uncounted(gate: str, people: People | None) -> str:
    """Why the latest waiver of a gate does not count, as a further clause; "" when nobody waived it."""
    mine = [item for item in people.waivers if item.gate == gate] if people is not None else []
    if people is None or not mine:
        return ""
    why = why_not(mine[-1], evidence=people.evidence, policy=people.policy, now=people.now) or "the gate has not one verdict"
    return f"; the waiver of {gate} by {mine[-1].by} does not count: {why}"


def _condition(verdict: GateVerdict, waiver: Waiver) -> str:
    missed = verdict.control is not None and not verdict.control.caught
    blind = f"; its positive control was missed ({verdict.control.detail})" if missed and verdict.control is not None else ""
    told = f"{verdict.gate} is {verdict.outcome}: {verdict.reason}{blind}"
    return f"{verdict.gate} waived by {waiver.by} until {shown(waiver.expires_at)}: {waiver.reason} ({told})"


def _passed(required: Sequence[str], waived: Sequence[tuple[GateVerdict, Waiver]], people: People | None) -> tuple[str, str]:
    """How many gates pass and which are waived, and what is still to be done about those."""
    total, gates = len(set(required)), [verdict.gate for verdict, _ in waived]
    passing = [gate for gate in dict.fromkeys(required) if gate not in gates]
    words = f"{len(passing)} of {total} required gates pass"
    if not waived or people is None:
        return f"{words}: {', '.join(passing)}", ""
    by = (f"{item.gate} waived by {item.by} until {shown(item.expires_at)}: {item.reason}" for _, item in waived)
    first = min((item for _, item in waived), key=lambda item: shown(item.expires_at))
    action = (
        f"before {shown(first.expires_at)}, mend what {first.gate} says and hold it again: "
        f"`seatrial gate {first.gate} --release {people.release_id}`"
    )
    return f"{words}, {', '.join(by)}", action


def _waiting(people: People, fallbacks: Sequence[FallbackCheck], reason: str, conditions: tuple[str, ...]) -> ReleaseDecision:
    """Held until a person has answered; what serves stays as it is."""
    ordered = [item for kind in FALLBACK_ORDER for item in fallbacks if item.kind == kind and item.version]
    kind, version = (people.serving_kind, people.serving_version) if people.serving_version else ("", "")
    if not version and ordered:
        kind, version = ordered[0].kind, ordered[0].version
    serving: ServingKind = next((known for known in SERVING_KINDS if known == kind), "none")
    days = f"{people.policy.approval_days.value:g} days"
    return ReleaseDecision(
        decision="held", serving_kind=serving, serving_version=version, reason=reason, conditions=conditions,
        waits_for_person=True,
        action=f"`seatrial approve {people.release_id} --by NAME --reason ...` (or --refuse), within {days}",
    )  # fmt: skip


def _refused(refusals: Sequence[tuple[str, str]], fallbacks: Sequence[FallbackCheck]) -> ReleaseDecision:
    """Fall back to the first version that loaded and answered; held when there is none."""
    reason, action = "; ".join(reason for reason, _ in refusals), refusals[0][1]
    for kind in FALLBACK_ORDER:
        for item in fallbacks:
            if item.kind == kind and item.version and item.loaded and item.predicted:
                return ReleaseDecision(
                    decision="fell_back", serving_kind=kind, serving_version=item.version, reason=reason, action=action
                )  # fmt: skip
    unusable = "; ".join(f"{item.kind} {item.version or '(none)'}: {item.detail}" for item in fallbacks) or "no fallback was named"
    return ReleaseDecision(
        decision="held", serving_kind="none", serving_version="", reason=f"{reason}; no fallback can serve ({unusable})",
        action=f"restore a fallback that loads and answers, then: {action}",
    )  # fmt: skip


def _refusal(verdicts: Sequence[GateVerdict], gate: str) -> tuple[str, str] | None:
    """Reason and action of a required gate that did not pass; None when it did."""
    mine = [verdict for verdict in verdicts if verdict.gate == gate]
    if not mine:
        return f"{gate} has no verdict", f"run `seatrial gate {gate}` for this release"
    for verdict in mine:
        if verdict.outcome is not Outcome.PASS:
            return f"{gate} is {verdict.outcome}: {verdict.reason}", verdict.action
        if verdict.control is not None and not verdict.control.caught:
            return f"{gate} passed but missed its control: {verdict.control.detail}", f"mend the probe of {gate} and run it again"
    return None

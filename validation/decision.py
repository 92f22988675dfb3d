"""What becomes of a release: verdicts and fallbacks in, one decision out. Nothing but a pass of every required gate promotes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from validation.records import FallbackCheck
from validation.verdict import GateVerdict, Outcome

FALLBACK_ORDER: tuple[Literal["last_known_good", "baseline"], ...] = ("last_known_good", "baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """The release's fate and what serves from now on."""

    decision: Literal["promoted", "fell_back", "held"]
    serving_kind: Literal["candidate", "last_known_good", "baseline", "none"]
    serving_version: str  # "" when nothing verified can serve, or the candidate has no version yet
    reason: str  # every required gate that did not pass, in its own words
    action: str  # the first one's next step; "" when promoted


def decide(
    *, verdicts: Sequence[GateVerdict], required: Sequence[str], fallbacks: Sequence[FallbackCheck], candidate_version: str = ""
) -> ReleaseDecision:
    """Promote when every required gate is present and passed; else fall back to the first version that loaded and answered.

    A gate that is missing did not pass, nor did one whose control was missed; of several verdicts of one gate all have to pass.
    No required gate at all promotes nothing. Fallbacks are tried in the order last known-good, baseline, whatever their order here.
    """
    refusals = [refusal for gate in dict.fromkeys(required) if (refusal := _refusal(verdicts, gate)) is not None]
    if not required:
        refusals = [("no gate is required by the policy, so nothing speaks for the candidate", "name required gates in the policy")]
    if not refusals:
        passed = f"{len(set(required))} of {len(set(required))} required gates pass: {', '.join(dict.fromkeys(required))}"
        return ReleaseDecision(
            decision="promoted", serving_kind="candidate", serving_version=candidate_version, reason=passed, action=""
        )  # fmt: skip
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

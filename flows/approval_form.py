"""Asking a person in the workflow engine: the flow run is suspended with a form, its process ends, and the answer starts it again.

A run that was started again finds its release and its evidence by their digests, and comes back here: the form's key is the basis, so the
answer is that of what was asked, and evidence that changed meanwhile asks anew. Outside a deployment nothing waits: the release is held.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field, create_model

from flows.clock import utc_now
from flows.people import (
    NAME_CHARS,
    REASON_CHARS,
    approval_of,
    checked_answer,
    days_later,
    record_approval,
    request_approval,
)
from infra.attestations import Notary
from infra.journal import Journal
from validation.errors import ConfigError
from validation.policy import Policy
from validation.waivers import Approval, human_review_s, shown

SHORTEST_WAIT_S = 60  # of a form that is shown shortly before its question lapses


class ApprovalForm(RunInput):
    """What a person fills in to let a candidate serve, or not."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS, pattern=r"\S", title="Your name")]
    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARS, pattern=r"\S", title="Reason, kept with the release")]
    approve: Annotated[bool, Field(title="The candidate may serve")] = False
    days: Annotated[float, Field(gt=0, title="Days that a yes counts")] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a person is asked."""

    journal: Journal
    notary: Notary
    policy: Policy
    basis: str  # `people_of(...).basis`
    description: str  # markdown above the form: headline, verdicts, where the report stands
    say: Callable[[str], Any]


def form_for(policy: Policy, description: str) -> type[ApprovalForm]:
    """The form under a policy: a yes cannot be given for longer than it allows."""
    limit = policy.decision.approval_days.value
    days = Field(default=limit, gt=0, le=limit, title="Days that a yes counts", description=f"at most {limit:g}")
    form: type[ApprovalForm] = create_model("ApprovalForm", __base__=ApprovalForm, days=(float, days))
    return form.with_initial_data(description=description)


def await_person(question: Question) -> Approval | None:
    """A person's yes or no to this basis: one that was given, or that of the form. None: nobody is waited for here, hold the release.

    In a flow's body only, since only there a run can be suspended; what comes before is run again when the answer starts it again.
    """
    journal, basis = question.journal, question.basis
    said = approval_of(journal, question.notary, basis)
    if said is not None:
        return said
    asked = request_approval(journal, basis, question.policy)
    run_id = deployed_run()
    if run_id is None:
        question.say(f"a person is asked since {shown(asked)}: seatrial approve {journal.release_id} --by NAME --reason ... (or --refuse)")
        return None
    form = _answered(question, asked)
    made = _answered_at(run_id, asked)
    try:
        answer = checked_answer(form.name, form.reason, approved=form.approve, days=form.days, made_at=made)
    except ConfigError as error:
        question.say(f"the form's answer cannot be kept: {error}")
        return None
    said = record_approval(journal, question.notary, basis, answer)
    words = "approved" if said.approved else "refused"
    question.say(f"{words} by {said.by} after {human_review_s(said):.0f} s: {said.reason}")
    return said


def deployed_run() -> UUID | None:
    """The flow run of a deployment that this is the body of; None elsewhere: nothing would start a suspended run again."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return None
    return context.flow_run.id


def _answered(question: Question, asked: str) -> ApprovalForm:
    """The form as it was filled in. The first time this ends the process: the run is suspended until somebody answers."""
    lapses = days_later(asked, question.policy.decision.approval_days.value)
    left = (datetime.fromisoformat(lapses) - datetime.now(UTC)).total_seconds()
    form = form_for(question.policy, question.description)
    question.say(f"a person is asked since {shown(asked)}, until {shown(lapses)}: resume this flow run to answer")
    return suspend_flow_run(
        wait_for_input=form, key=f"approval-{question.basis[:16]}", timeout=max(SHORTEST_WAIT_S, round(left))
    )  # fmt: skip


def _answered_at(run_id: UUID, asked: str) -> str:
    """When the form was sent: the run's last resumption, so that waiting for a worker is not counted as a person's time."""
    now = utc_now()
    resumed: list[datetime] = []
    with suppress(Exception), get_client(sync_client=True) as client:  # the answer counts, with this process's time, whatever happens here
        resumed = [state.timestamp for state in client.read_flow_run_states(run_id) if state.name == "Resuming"]
    at = max(resumed).astimezone(UTC).isoformat(timespec="seconds") if resumed else now
    return min(now, max(asked, at))

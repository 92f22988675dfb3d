"""A flow that waits for a person and tells what was said: what a release does at its end, without the gates before it."""

from pathlib import Path

from prefect import flow

from flows.approval_form import Question, await_person
from flows.people import basis_of
from infra.attestations import open_notary
from infra.journal import Journal
from infra.settings import load_settings
from infra.store import open_store
from validation.policy import parse_policy
from validation.waivers import human_review_s


@flow(name="asking", persist_result=False)
def asking(release_id: str, policy: str) -> str:
    """Wait for a person's word about a release that stands in the store; returns it with the wait."""
    settings = load_settings()
    store = open_store(settings)
    notary, journal = open_notary(store, settings), Journal(store, release_id)
    with (Path(settings.home) / "starts.txt").open("a") as starts:
        starts.write("started\n")
    question = Question(
        journal=journal, notary=notary, policy=parse_policy(policy), basis=basis_of(journal, notary),
        description="**five of six gates pass**", say=print,
    )  # fmt: skip
    said = await_person(question)
    return "nobody" if said is None else f"{said.by}: {said.reason} ({said.approved}, {human_review_s(said):.0f} s)"

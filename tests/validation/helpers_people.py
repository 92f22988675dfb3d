"""Waivers and approvals that count, as small records; each test changes what it is about."""

from typing import Any

from validation.policy import parse_policy
from validation.waivers import Approval, People, Waiver, approval_basis

NOW = "2026-03-10T12:00:00+00:00"
EVIDENCE = {"scaling": "5" * 64, "readiness": "6" * 64, "data_contract": "7" * 64}
RELEASE_ID = "flights-20260310-110000-ab12"
BASIS = approval_basis(release_id=RELEASE_ID, weights="8" * 64, gates={})


def waiver(**changes: Any) -> Waiver:
    """Ada waives scaling for ten days."""
    given = {
        "gate": "scaling", "by": "Ada", "reason": "one device is enough for now", "made_at": "2026-03-10T11:00:00+00:00",
        "expires_at": "2026-03-20T11:00:00+00:00", "evidence": EVIDENCE["scaling"], "attestation": "9" * 64,
    }  # fmt: skip
    return Waiver(**{**given, **changes})


def approval(**changes: Any) -> Approval:
    """Grace says yes an hour after she was asked."""
    given: dict[str, Any] = {
        "by": "Grace", "reason": "read the report", "approved": True, "requested_at": "2026-03-10T10:00:00+00:00",
        "made_at": "2026-03-10T11:00:00+00:00", "expires_at": "2026-03-17T11:00:00+00:00", "basis": BASIS, "attestation": "a" * 64,
    }  # fmt: skip
    return Approval(**{**given, **changes})


def people(*, asked: bool = False, policy: str = "", **changes: Any) -> People:
    """Nobody said anything; `asked`: the policy asks for a yes. Args: policy, YAML of the decision section, beside that."""
    text = f"decision: {{approval: {str(asked).lower()}, waivable: [scaling, readiness]{', ' if policy else ''}{policy}}}"
    given: dict[str, Any] = {
        "policy": parse_policy(text).decision, "now": NOW, "release_id": RELEASE_ID, "evidence": EVIDENCE, "basis": BASIS,
    }  # fmt: skip
    return People(**{**given, **changes})

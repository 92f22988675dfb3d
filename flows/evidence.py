"""A gate's evidence: verdict, the records it was read from, and the digests that bind it. Written once, addressed by content."""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import pandas as pd
from pydantic import TypeAdapter

from infra.store import ObjectStore, get_evidence, put_blob, put_evidence
from validation.verdict import GateVerdict

_VERDICT = TypeAdapter(GateVerdict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one attempt at a gate took."""

    seconds: float = 0.0  # wall clock of probe and judgement
    worker_seconds: float = 0.0  # ranks x seconds they existed
    queued_s: float = 0.0  # waited for the machine's devices


def keep_gate_evidence(
    store: ObjectStore,
    verdict: GateVerdict,
    records: Any,
    *,
    release_id: str,
    attempt: int,
    digests: Mapping[str, str],
    sources: Mapping[str, str] | None = None,
    spent: Spent = Spent(),
    made_at: str,
) -> str:
    """Write the records' tables and the evidence document; returns the document's sha256.

    Args: digests, of everything that the verdict depends on; sources, file -> sha256 of the code behind digests["code"].
    """
    return put_evidence(
        store,
        {
            "kind": "gate", "release_id": release_id, "gate": verdict.gate, "attempt": attempt, "verdict": verdict,
            "records": None if records is None else _referenced(store, records), "digests": dict(digests), "sources": dict(sources or {}),
            "seconds": spent.seconds,
            "worker_seconds": spent.worker_seconds, "queued_s": spent.queued_s, "made_at": made_at,
        },
    )  # fmt: skip


def verdict_of(store: ObjectStore, sha256: str) -> tuple[GateVerdict, dict[str, Any]]:
    """Read a gate's evidence back, its digest verified. Raises EvidenceError when it is absent or was altered."""
    document = get_evidence(store, sha256)
    return _VERDICT.validate_python(document["verdict"]), document


def _referenced(store: ObjectStore, value: Any) -> Any:
    """A record as plain values, each table replaced by the sha256 of its Parquet file in the store."""
    if isinstance(value, pd.DataFrame):
        buffer = io.BytesIO()
        value.to_parquet(buffer, index=False)
        return {"parquet_sha256": put_blob(store, buffer.getvalue()), "rows": len(value), "columns": list(value.columns)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _referenced(store, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _referenced(store, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_referenced(store, item) for item in value]
    return value

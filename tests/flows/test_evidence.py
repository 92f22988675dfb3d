"""Evidence: what is kept can be read back and judged again; what was altered is refused."""

import io
import math
import sys
from subprocess import run

import pandas as pd
import pytest

from flows.evidence import keep_gate_evidence, verdict_of
from infra.store import MemoryStore, evidence_key, get_blob, get_evidence
from validation.errors import EvidenceError
from validation.records import FallbackCheck, ReadinessRecords
from validation.verdict import GateVerdict, check, conclude


def verdict(observed: float) -> GateVerdict:
    return conclude("scaling", [check("efficiency", observed, ">=", 0.5, unit="", source="test")], passed_reason="fine")


def kept(store: MemoryStore, made: GateVerdict, records: object = None) -> str:
    return keep_gate_evidence(
        store, made, records, release_id="tiny-20260101-000000-aaaa", attempt=1, digests={"code": "c"}, 
        made_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


@pytest.mark.parametrize("observed", [0.7, 0.3, math.inf], ids=["pass", "fail", "infinite"])
def test_a_verdict_comes_back_as_it_was(observed: float) -> None:
    """Outcome, reason and every check survive the way through the store."""
    store = MemoryStore()
    back, document = verdict_of(store, kept(store, verdict(observed)))

    assert (back.outcome, back.reason) == (verdict(observed).outcome, verdict(observed).reason)
    assert document["digests"] == {"code": "c"}


def test_nan_is_kept_as_a_word_and_stays_a_failure() -> None:
    """A broken measurement is evidence too."""
    store = MemoryStore()
    back, _ = verdict_of(store, kept(store, verdict(math.nan)))

    assert (back.outcome, back.checks[0].observed, back.checks[0].passed) == ("fail", "NaN", False)


def test_tables_stand_beside_the_document_under_their_own_digest() -> None:
    """A record's frame is a Parquet blob; the document holds its sha256, columns and length."""
    store = MemoryStore()
    sha256 = kept(store, verdict(0.7), {"points": pd.DataFrame({"world_size": [1, 2]}), "named": [1.0]})
    reference = get_evidence(store, sha256)["records"]["points"]

    assert (reference["rows"], reference["columns"]) == (2, ["world_size"])
    assert pd.read_parquet(io.BytesIO(get_blob(store, reference["parquet_sha256"])))["world_size"].tolist() == [1, 2]


def test_records_of_records_are_plain() -> None:
    """Nested records become mappings of plain values."""
    fallback = FallbackCheck(kind="baseline", version="1", loaded=True, predicted=True, detail="")
    records = ReadinessRecords(modes=(), drills=(), costs={"usd": 1.0}, fallbacks=(fallback,))
    store = MemoryStore()

    assert get_evidence(store, kept(store, verdict(0.7), records))["records"]["fallbacks"][0]["version"] == "1"


def test_same_evidence_same_bytes() -> None:
    """Evidence is addressed by content: keeping it twice is one object."""
    store = MemoryStore()

    assert kept(store, verdict(0.7)) == kept(store, verdict(0.7))
    assert len(store.list("evidence/")) == 1


def test_altered_evidence_is_refused() -> None:
    """One changed byte, and no verdict is read from it."""
    store = MemoryStore()
    key = evidence_key(kept(store, verdict(0.3)))
    body, etag = store.get_with_etag(key)
    store.replace(key, body.replace(b'"outcome":"fail"', b'"outcome":"pass"'), etag)

    with pytest.raises(EvidenceError):
        verdict_of(store, key.rpartition("/")[2])


def test_the_flow_process_never_imports_torch() -> None:
    """Importing all of flows leaves torch to the warm processes."""
    code = "import flows.cli, flows.release, flows.history, flows.training, sys; sys.exit('torch' in sys.modules)"

    assert run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0

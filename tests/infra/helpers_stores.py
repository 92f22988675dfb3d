"""Stores to test with: the same contract over a folder, memory and a real S3 endpoint on this machine."""

from pathlib import Path

from infra.settings import Settings, load_settings
from infra.store import MemoryStore, ObjectStore, open_store

KINDS = ("memory", "folder", "s3")


def make_store(kind: str, tmp_path: Path, endpoint: str = "", prefix: str = "") -> ObjectStore:
    """A fresh store; S3 gets a prefix of its own in the shared bucket."""
    if kind == "memory":
        return MemoryStore()
    if kind == "folder":
        return open_store(load_settings(home=tmp_path / "a home", store=str(tmp_path / "a store")))
    return open_store(s3_settings(tmp_path, endpoint, f"s3://trial/{prefix}", store_part_mib=5))


def s3_settings(tmp_path: Path, endpoint: str, store: str, **given: object) -> Settings:
    """Settings of an S3 store behind an endpoint."""
    return load_settings(home=tmp_path, store=store, store_endpoint=endpoint, store_region="us-east-1", **given)

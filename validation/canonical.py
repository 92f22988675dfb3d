"""One byte sequence for one value: canonical JSON and its sha256.

Sorted keys, no spaces, UTF-8, floats as Python's shortest round-trip form. NaN and infinities have no JSON form; they are written
as the strings "NaN", "Infinity", "-Infinity", so that evidence of a broken measurement can still be kept and read.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Turn records, enums, mappings and sequences into JSON types. Raises TypeError for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no canonical JSON form; convert it to a record, list, str or number first.")


def canonical_json(value: Any) -> bytes:
    """Encode a value so that equal values give equal bytes."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_hex(body: bytes) -> str:
    """sha256 of bytes, 64 hex digits."""
    return hashlib.sha256(body).hexdigest()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON, 64 hex digits."""
    return sha256_hex(canonical_json(value))

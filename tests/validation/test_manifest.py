"""A manifest vouches for exact bytes of exact files of one step and run, and for nothing else."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.canonical import canonical_json, sha256_hex
from validation.errors import DataError
from validation.manifest import FileSeal, Manifest, build_manifest, check_identity, parse_manifest, sign, verify_manifest

KEY = bytes(range(32))
BODIES = {"__0_0.distcp": b"tensors", ".metadata": b"a pickle", "state.json": b"{}"}
RUN = {"recipe": "tiny", "seed": 3}


def manifest(**changes):
    files = {name: FileSeal(bytes=len(body), sha256=sha256_hex(body)) for name, body in BODIES.items()}
    return replace(Manifest(step=10, run=RUN, files=files), **changes)


def verify(bodies=BODIES, *, body=None, key=KEY, step=10, run=RUN):
    sizes = {name: len(content) for name, content in bodies.items()}
    sha256 = {name: sha256_hex(content) for name, content in bodies.items()}
    return verify_manifest(body or build_manifest(manifest(), KEY), key, sizes=sizes, sha256=sha256, step=step, run=run)


def test_whole_checkpoint_verifies():
    """What was sealed is what verifies."""
    assert verify() == manifest()


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        pytest.param({**BODIES, "__0_0.distcp": b"tensorz"}, "__0_0.distcp was altered: it has sha256", id="flipped"),
        pytest.param({**BODIES, "__0_0.distcp": b"tens"}, "__0_0.distcp is truncated: it has 4 bytes, 7 were sealed", id="truncated"),
        pytest.param({**BODIES, ".metadata": b"a pickle and more"}, r"\.metadata is too long", id="longer"),
        pytest.param({name: BODIES[name] for name in BODIES if name != ".metadata"}, r"\.metadata is missing", id="missing"),
        pytest.param({**BODIES, "__1_0.distcp": b""}, "__1_0.distcp is extra: nobody signed for it", id="extra"),
        pytest.param({**BODIES, "state.json": b"tensors", "__0_0.distcp": b"{}"}, "__0_0.distcp is truncated", id="swapped"),
    ],
)
def test_other_files_are_refused_by_name(bodies, said):
    """Each kind of damage to a file is told with the file's name."""
    with pytest.raises(DataError, match=said):
        verify(bodies)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param({"step": 20}, "belongs to step 10, not to step 20", id="step"),
        pytest.param({"run": {"recipe": "tiny", "seed": 4}}, "belongs to another run: seed is 3, not 4", id="seed"),
        pytest.param({"run": {"recipe": "tiny"}}, "belongs to another run: seed is 3, not None", id="fact-more"),
        pytest.param({"key": b"x" * 32}, "altered, or sealed with another key", id="key"),
        pytest.param({"body": b"\x00"}, "torn or altered", id="no-json"),
        pytest.param({"body": b"[" * 100_000}, "torn or altered", id="deep"),
        pytest.param({"body": b"[1]"}, "torn or altered", id="no-object"),
        pytest.param({"body": b'{"step":10}'}, "torn or altered", id="no-mac"),
        pytest.param({"body": b'{"hmac":null,"step":10}'}, "its MAC does not fit", id="mac-null"),
        pytest.param({"body": b'{"hmac":"\xc3\xa9"}'}, "its MAC does not fit", id="mac-not-ascii"),
        pytest.param({"body": sign({"format": 1}, KEY)}, "format 1, and this version reads format 2", id="format"),
        pytest.param({"body": sign({"format": 2, "step": 1, "run": {}, "files": 5}, KEY)}, "signed and yet no manifest", id="no-files"),
    ],
)
def test_other_manifests_are_refused(found, said):
    """A manifest of another step, run, key or form vouches for nothing."""
    with pytest.raises(DataError, match=said):
        verify(**found)


def test_empty_manifest_is_refused():
    """A file that was created and never written is no manifest."""
    with pytest.raises(DataError, match=r"MANIFEST\.json is empty"):
        parse_manifest(b"", KEY)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "..", ".", "", "a\x00b", "MANIFEST.json", "-x", "x" * 300])
def test_path_tricks_are_no_names(name):
    """Only plain names can be sealed, and a signed manifest with another one is still refused."""
    crooked = manifest(files={name: FileSeal(bytes=0, sha256=sha256_hex(b""))})
    with pytest.raises(DataError, match="no plain file"):
        build_manifest(crooked, KEY)
    with pytest.raises(DataError, match="no plain file"):
        parse_manifest(sign({"format": 2, "step": 10, "run": RUN, "files": crooked.files}, KEY), KEY)


def test_another_spelling_is_refused():
    """The same values with one space more are not the bytes that were signed."""
    body = json.dumps(json.loads(build_manifest(manifest(), KEY))).encode()

    with pytest.raises(DataError, match="its MAC does not fit"):
        parse_manifest(body, KEY)


names = st.from_regex(r"\.?[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(lambda name: name != "MANIFEST.json")
seals = st.builds(FileSeal, bytes=st.integers(0, 2**63), sha256=st.binary(max_size=9).map(sha256_hex))
facts = st.dictionaries(st.text(max_size=9), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9))
manifests = st.builds(
    Manifest, step=st.integers(0, 2**63), run=facts, files=st.dictionaries(names, seals, max_size=6)
)  # fmt: skip


@given(manifests, st.binary(min_size=32, max_size=64))
def test_any_manifest_comes_back(given_manifest, key):
    """What was built is what is parsed, whatever the names, sizes and facts; building twice gives the same bytes."""
    body = build_manifest(given_manifest, key)

    again = parse_manifest(body, key)
    assert canonical_json(again) == canonical_json(given_manifest)
    assert build_manifest(again, key) == body
    check_identity(again, step=given_manifest.step, run=given_manifest.run)


@given(manifests, st.data())
def test_any_changed_byte_is_seen(given_manifest, data):
    """One bit anywhere in a manifest, or one byte less, and it is refused."""
    body = build_manifest(given_manifest, KEY)
    place, bit = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 7))
    flipped = body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 :]

    for damaged in (flipped, body[:place]):
        with pytest.raises(DataError, match=r"MANIFEST\.json"):
            parse_manifest(damaged, KEY)

"""Pointer against registry: every difference with the one repair that is safe."""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from validation.reconcile import (
    BASELINE_ALIAS,
    FILES_TAG,
    GOOD_ALIAS,
    SERVING_ALIAS,
    Admission,
    Difference,
    Registered,
    View,
    after_moves,
    reconcile,
    wanted_aliases,
)  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """Version 3 serves, 2 is last known-good, 1 the baseline."""

    model: str = "boat"
    serving_version: str = "3"
    last_known_good: str = "2"
    baseline: str = "1"
    sequence: int = 3


ALIASES = {SERVING_ALIAS: "3", GOOD_ALIAS: "2", BASELINE_ALIAS: "1"}
OURS = {alias: (version,) for alias, version in ALIASES.items()}


def registered(version: str, **given: Any) -> Registered:
    """A version whose page and files are as they have to be."""
    usual = {"status": "baseline" if version == "1" else "promoted", "files": f"f{version}", "files_tag": f"f{version}"}
    return Registered(version=version, **(usual | given))


def admission(version: str, **given: Any) -> Admission:
    """One that verifies."""
    return Admission(**({"kind": "baseline" if version == "1" else "decision", "files": f"f{version}"} | given))


VERSIONS = {version: registered(version) for version in "1234"}
ADMITTED = {version: admission(version) for version in "123"}  # version 4 was never let through
VERSIONS["4"] = replace(VERSIONS["4"], status="refused")


def found(pointer: Pointer | None = None, *, policy: Any = "put_back", **given: Any) -> tuple[Difference, ...]:
    """The differences; name only what is not as it has to be."""
    view = View(
        aliases=given.get("aliases", ALIASES), versions=given.get("versions", VERSIONS), mirrored=given.get("mirrored", OURS)
    )  # fmt: skip
    return reconcile(pointer or Pointer(), view, given.get("admitted", ADMITTED), moved_alias=policy)


def brief(differences: tuple[Difference, ...]) -> list[tuple[str, str, str]]:
    """Kind, subject, repair."""
    return [(item.kind, item.subject, item.repair) for item in differences]


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A dict that lacks some keys."""
    return {key: value for key, value in values.items() if key not in names}


@pytest.mark.parametrize("policy", ["put_back", "adopt"])
def test_what_is_in_step_has_no_differences(policy: str) -> None:
    """Nothing to do under either policy, also when the baseline alone serves."""
    assert found(policy=policy) == ()
    alone = Pointer(serving_version="1", last_known_good="")
    aliases = {SERVING_ALIAS: "1", BASELINE_ALIAS: "1"}
    assert found(alone, aliases=aliases, policy=policy) == ()


@pytest.mark.parametrize("policy", ["put_back", "adopt"])
@pytest.mark.parametrize("alias", [SERVING_ALIAS, GOOD_ALIAS, BASELINE_ALIAS])
def test_an_alias_that_was_deleted_is_set(alias: str, policy: str) -> None:
    """Missing aliases are never taken for a wish."""
    (item,) = found(aliases=without(ALIASES, alias), policy=policy)

    assert (item.kind, item.subject, item.repair, item.wanted) == ("alias_missing", alias, "set_alias", ALIASES[alias])


def test_a_moved_alias_is_put_back() -> None:
    """The default policy: the pointer decides."""
    assert brief(found(aliases=ALIASES | {SERVING_ALIAS: "2"})) == [("alias_moved", SERVING_ALIAS, "set_alias")]


def test_under_adopt_the_pointer_follows_a_person() -> None:
    """Moved by hand to an admitted version: it serves from now on, and the newer one that was left is not the last known-good."""
    (item,) = found(aliases=ALIASES | {SERVING_ALIAS: "2"}, policy="adopt")[:1]

    assert (item.repair, item.version) == ("adopt", "2")
    assert after_moves(Pointer(), [item]) == ("2", "", True)
    assert wanted_aliases(Pointer(), [item]) == {SERVING_ALIAS: "2", BASELINE_ALIAS: "1"}


def test_a_person_who_goes_forward_leaves_a_last_known_good() -> None:
    """From 2 to 3 by hand: version 2 served well until then."""
    at = Pointer(serving_version="2", last_known_good="")
    mirrored = {SERVING_ALIAS: ("2",), GOOD_ALIAS: ("",), BASELINE_ALIAS: ("1",)}
    moves = found(at, aliases={SERVING_ALIAS: "3", BASELINE_ALIAS: "1"}, mirrored=mirrored, policy="adopt")

    assert after_moves(at, moves) == ("3", "2", True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({}, "no signed decision", id="not-admitted"),
        pytest.param({"admitted": ADMITTED | {"4": admission("4", problem="forged")}}, "forged", id="forged"),
        pytest.param({"admitted": ADMITTED | {"4": admission("4", files="other")}}, "were altered", id="altered"),
        pytest.param({"admitted": ADMITTED | {"4": admission("4")}}, r"taken out of service \(refused\)", id="refused"),
    ],
)
@pytest.mark.parametrize("policy", ["put_back", "adopt"])
def test_an_alias_on_a_version_that_may_not_serve_is_always_put_back(change: dict[str, Any], why: str, policy: str) -> None:
    """No policy lets a version serve that does not verify."""
    (item,) = found(aliases=ALIASES | {SERVING_ALIAS: "4"}, policy=policy, **change)

    assert (item.kind, item.repair, item.wanted) == ("alias_moved", "set_alias", "3")
    assert re.search(why, item.words)


@pytest.mark.parametrize("policy", ["put_back", "adopt"])
@pytest.mark.parametrize(
    "mirrored", [{}, {SERVING_ALIAS: ("3", "2"), GOOD_ALIAS: ("2", ""), BASELINE_ALIAS: ("1",)}, {SERVING_ALIAS: ("2",)}]
)
def test_an_alias_that_lags_behind_is_no_wish(policy: str, mirrored: dict[str, tuple[str, ...]]) -> None:
    """A release moved the pointer and died before the alias followed: it is set, and never adopted, or the promotion would be undone."""
    given = {SERVING_ALIAS: "2", GOOD_ALIAS: "2", BASELINE_ALIAS: "1"}

    assert brief(found(aliases=given, mirrored=mirrored, policy=policy)) == [("alias_behind", SERVING_ALIAS, "set_alias")]


def test_an_alias_of_ours_that_should_not_be_goes() -> None:
    """Without a last known-good there is no such alias."""
    items = found(Pointer(last_known_good=""), mirrored={})

    assert brief(items) == [("alias_extra", GOOD_ALIAS, "delete_alias")]


def test_aliases_of_other_people_are_only_named() -> None:
    """They are nobody's business here, and nobody has to come."""
    (item,) = found(aliases=ALIASES | {"shadow": "4"})

    assert (item.kind, item.repair, item.needs_person) == ("alias_extra", "report_only", False)


@pytest.mark.parametrize("policy", ["put_back", "adopt"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param({"versions": without(VERSIONS, "3")}, "version_deleted", id="deleted"),
        pytest.param({"versions": VERSIONS | {"3": registered("3", files="x")}}, "version_altered", id="altered"),
        pytest.param({"versions": VERSIONS | {"3": registered("3", files="")}}, "version_altered", id="files-gone"),
        pytest.param({"versions": VERSIONS | {"3": registered("3", silent="hangs")}}, "version_silent", id="silent"),
        pytest.param({"admitted": ADMITTED | {"3": admission("3", problem="edited")}}, "version_not_proven", id="evidence"),
        pytest.param({"admitted": without(ADMITTED, "3")}, "version_not_admitted", id="not-admitted"),
    ],
)
def test_a_version_that_cannot_serve_gives_way(change: dict[str, Any], kind: str, policy: str) -> None:
    """The last known-good takes over, and is the last known-good no more."""
    item = found(policy=policy, **change)[0]

    assert (item.kind, item.repair, item.version) == (kind, "roll_back_to", "2")
    assert after_moves(Pointer(), [item]) == ("2", "", True)


def test_a_pointer_to_a_version_that_never_was_gives_way() -> None:
    """Version 9 is neither registered nor admitted."""
    assert brief(found(Pointer(serving_version="9")))[0] == ("pointer_to_missing_version", "version 9", "roll_back_to")


def test_after_the_last_known_good_comes_the_baseline() -> None:
    """Both newer versions are gone: the named baseline serves, without a last known-good."""
    items = found(versions=without(VERSIONS, "2", "3"), aliases={BASELINE_ALIAS: "1"})

    assert brief(items) == [
        ("version_deleted", "version 3", "roll_back_to"),
        ("version_deleted", "version 2", "drop_last_known_good"),
        ("alias_missing", SERVING_ALIAS, "set_alias"),
    ]
    assert after_moves(Pointer(), items) == ("1", "", True)


def test_a_fallback_that_was_taken_out_of_service_is_passed_over() -> None:
    """A version that was rolled back before does not come back by itself."""
    versions = without(VERSIONS, "3") | {"2": registered("2", status="rolled_back")}

    assert found(versions=versions)[0].version == "1"


def test_when_nothing_verifies_everything_stays() -> None:
    """Reported for a person; nothing that moves the pointer, no alias on an unverified version."""
    admitted = {version: admission(version, problem="unknown key") for version in "123"}
    items = found(admitted=admitted, policy="adopt", aliases=ALIASES | {SERVING_ALIAS: "2"})

    assert {item.repair for item in items} == {"report_only", "set_alias"}
    assert after_moves(Pointer(), items) == ("3", "2", False)
    assert items[0].needs_person
    assert "not moved" in items[0].words


def test_files_that_cannot_be_read_move_nothing() -> None:
    """A store of files that does not answer says nothing about the version: it stays until it is read."""
    items = found(versions=VERSIONS | {"3": registered("3", files="", unread="timed out")})

    assert brief(items) == [("files_unread", "version 3", "report_only")]
    assert items[0].needs_person


def test_a_last_known_good_that_is_gone_is_forgotten() -> None:
    """What serves stays; the pointer names nothing that could not take over."""
    items = found(versions=without(VERSIONS, "2"), aliases=without(ALIASES, GOOD_ALIAS))

    assert brief(items) == [("version_deleted", "version 2", "drop_last_known_good")]
    assert after_moves(Pointer(), items) == ("3", "", True)


def test_a_baseline_that_is_gone_needs_a_person() -> None:
    """Nothing can be put in its place here."""
    items = found(versions=without(VERSIONS, "1"), aliases=without(ALIASES, BASELINE_ALIAS))

    assert [(item.kind, item.repair, item.needs_person) for item in items] == [("version_deleted", "report_only", True)]


def test_pages_say_what_was_signed() -> None:
    """Status and digest that were edited are set again, a description that is missing is written; "rolled_back" is never overwritten."""
    versions = VERSIONS | {
        "1": registered("1", described=False), "2": registered("2", files_tag=""), "3": registered("3", status=""),
    }  # fmt: skip
    items = found(versions=versions)

    assert [(item.repair, item.version, item.tag) for item in items] == [
        ("describe", "1", ""),
        ("set_tag", "2", FILES_TAG),
        ("set_tag", "3", "status"),
    ]
    (left,) = found(versions=VERSIONS | {"3": registered("3", status="rolled_back")})
    assert left.repair == "report_only"


@pytest.mark.parametrize(
    ("version", "marked"),
    [
        pytest.param(Registered(version="5", owner="boat-1", owner_is_over=True), True, id="dead"),
        pytest.param(Registered(version="5", owner="boat-1"), False, id="still-running"),
        pytest.param(Registered(version="5", owner="boat-1", owner_is_over=True, status="refused"), False, id="judged"),
    ],
)
def test_what_a_dead_release_left_is_marked(version: Registered, marked: bool) -> None:
    """A version that nobody will judge any more is called abandoned; one of a release that goes on is left alone."""
    items = found(versions=VERSIONS | {"5": version})

    assert brief(items) == ([("version_abandoned", "version 5", "mark_abandoned")] if marked else [])


def test_no_view_puts_an_unverified_version_in_service() -> None:
    """Over every combination of broken versions, aliases and policies: what would serve verifies, or nothing moves."""
    broken = {
        "fine": (registered, admission), "gone": (lambda _: None, admission),
        "altered": (lambda v: registered(v, files="x"), admission),
        "forged": (registered, lambda v: admission(v, problem="forged")),
        "left": (lambda v: registered(v, status="rolled_back"), admission),
    }  # fmt: skip
    for one, two, three in product(broken, repeat=3):
        state = dict(zip("123", (one, two, three), strict=True))
        versions = {v: made for v, name in state.items() if (made := broken[name][0](v)) is not None} | {"4": VERSIONS["4"]}
        admitted = {v: broken[name][1](v) for v, name in state.items()}
        for alias, policy in product("1234", ("put_back", "adopt")):
            items = found(versions=versions, admitted=admitted, aliases=ALIASES | {SERVING_ALIAS: alias}, policy=policy)
            serving, good, _ = after_moves(Pointer(), items)
            assert serving == "3" or state.get(serving) == "fine", (state, alias, policy)
            assert good in ("", "2", "3"), (state, alias, policy)
            assert good == "" or good != serving
            assert state["3"] in ("fine", "left") or serving != "3" or "fine" not in (one, two)

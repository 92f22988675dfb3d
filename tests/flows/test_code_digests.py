"""Evidence goes stale with the code that its gate reaches, and with no other."""

import ast
import shutil
import sys
import time
from pathlib import Path

import pytest

from flows.code_digests import (
    ENTRIES,
    HERE,
    JUDGING,
    LEFT_OUT,
    PACKAGES,
    all_sources,
    changed_modules,
    code_changed,
    gate_code_sha256,
    gate_sources,
)
from trainer.recipe_code import code_digest, recipe_sources
from validation.canonical import sha256_hex
from validation.errors import ConfigError
from validation.policy import GATES

TRAINING = {"gradient_equivalence", "kill_and_resume", "scaling", "slice_quality", "readiness", "candidate"}  # all that run rank groups


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the four packages; each test has its own, since sources are read once a process."""
    for package in PACKAGES:
        shutil.copytree(HERE / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def stale(tree: Path, file: str, text: str = "# edited\n") -> set[str]:
    """The gates whose digest a file's edit changes."""
    before = all_sources("flights", folder=HERE)
    with (tree / file).open("a") as source:
        source.write(text)
    after = all_sources("flights", folder=tree)
    return {gate for gate in ENTRIES if changed_modules(before[gate], after[gate]) == [file]}


@pytest.mark.parametrize(
    ("file", "gates"),
    [
        ("validation/equivalence_poison.py", {"gradient_equivalence", "readiness"}),  # an import of an import; readiness drills it too
        ("validation/slice_stats.py", {"slice_quality", "readiness"}),
        ("validation/recovery_samples.py", {"kill_and_resume", "readiness"}),
        ("validation/contract_suite.py", {"data_contract", "readiness"}),
        ("trainer/reference.py", {"gradient_equivalence", "readiness"}),  # only named: "trainer.reference:gradient_errors"
        ("flows/contenders.py", {"slice_quality"}),  # only named: "flows.contenders:score_contenders"
        ("infra/export.py", {"slice_quality", "candidate"}),
        ("trainer/group.py", TRAINING),  # behind a text that an interpreter is started with
        ("trainer/loop.py", TRAINING),
        ("validation/canonical.py", {*ENTRIES}),
        ("flows/cli.py", set()),
        ("flows/release.py", set()),
        ("infra/report.py", set()),
        ("infra/terminal.py", set()),
        ("trainer/recipes/bytes_text.py", set()),  # another recipe's
    ],
)  # fmt: skip
def test_an_edit_makes_stale_the_gates_that_reach_it(file: str, gates: set[str], tree: Path) -> None:
    """A change in a module, however deep, changes the digests of the gates that reach it and no others; a comment is a change."""
    assert stale(tree, file) == gates


def test_every_gate_and_the_candidate_have_entries() -> None:
    """No gate of the policy is without code, and all that is named by hand exists."""
    named = [*LEFT_OUT, *(module for entries in ENTRIES.values() for module in entries)]

    assert {*ENTRIES} == {*GATES, "candidate"}
    assert not [name for name in named if not (HERE / f"{name.replace('.', '/')}.py").is_file()]
    assert all({f"{module.replace('.', '/')}.py" for module in ENTRIES[gate]} <= {*gate_sources(gate, "flights")} for gate in ENTRIES)


def test_the_entries_are_what_the_gates_are_made_of() -> None:
    """Every module that probe_and_judge takes a function from is reached by the gate that takes it."""
    body = ast.parse((HERE / JUDGING[0]).read_text()).body
    homes = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    judging = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == JUDGING[1])
    for case in (case for node in judging.body if isinstance(node, ast.Match) for case in node.cases):
        gate = ast.literal_eval(case.pattern.value)  # type: ignore[attr-defined]
        used = {
            home for node in ast.walk(case) if isinstance(node, ast.Name) and (home := homes.get(node.id)) and home.startswith(PACKAGES)
        }
        files = {f"{name.replace('.', '/')}.py" for name in used}

        assert files - {"flows/__init__.py", "flows.py"} <= {*gate_sources(gate, "flights")}, gate


def test_who_puts_a_gate_together_counts(tree: Path) -> None:
    """Another call in probe_and_judge makes every gate stale, anything else in its module none; train is the candidate's."""
    before = all_sources("flights", folder=HERE)
    for file, (old, new) in {
        "flows/hands.py": ("policy.scaling)", "policy.scaling )"), "flows/candidate.py": ("candidate(bench)", "candidate( bench)"),
    }.items():  # fmt: skip
        (tree / file).write_text((tree / file).read_text().replace(old, new) + "# edited\n")
    after = all_sources("flights", folder=tree)

    assert {gate: changed_modules(before[gate], after[gate]) for gate in ENTRIES} == {
        **{gate: ["flows/hands.py:probe_and_judge"] for gate in GATES},
        "candidate": ["flows/candidate.py:train"],
    }


def test_a_helper_that_is_new_or_gone_is_a_change(tree: Path) -> None:
    """A module that a gate did not reach before is named beside the one that reaches it."""
    (tree / "validation/noise_of_one.py").write_text("")
    with (tree / "validation/noise.py").open("a") as source:
        source.write("from validation.noise_of_one import x\n")
    sources = gate_sources("gradient_equivalence", "flights"), gate_sources("gradient_equivalence", "flights", folder=tree)

    assert changed_modules(*sources) == ["validation/noise.py", "validation/noise_of_one.py"]
    assert changed_modules({"a.py": "1", "b.py": "2"}, {"b.py": "2"}) == ["a.py"]


def test_what_changed_is_said_in_few_words() -> None:
    """A person reads the files, the first three of them by name."""
    old = {f"validation/{name}.py": "1" for name in "abcde"}

    assert code_changed(old, old) == ""
    assert code_changed(old, old | {"validation/b.py": "2"}) == "code changed (validation/b.py)"
    assert code_changed(old, {}) == "code changed (validation/a.py, validation/b.py, validation/c.py and 2 more)"


def test_a_teams_recipe_counts_with_what_it_takes_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's own modules are in every gate's map, and so is any of our modules that only the recipe imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "team_digest.py").write_text("import team_helper\nfrom infra.terminal import x\n")
    (tmp_path / "team_helper.py").write_text("")
    found = gate_sources("data_contract", "team_digest:recipe")
    sha256 = gate_code_sha256("scaling", "team_digest:recipe")
    (tmp_path / "team_helper.py").write_text("x = 1\n")

    assert found["team_helper.py"] == sha256_hex(b"")
    assert "infra/terminal.py" in found
    assert "trainer/recipes/flights.py" not in found
    assert gate_code_sha256("scaling", "team_digest:recipe") != sha256


def test_the_recipes_digest_covers_the_same_sources() -> None:
    """What `code_digest` covers is in every gate's map under its file."""
    recipe = {sha256_hex(source.body) for source in recipe_sources("flights").values()}

    assert len(code_digest("flights")) == 64
    assert all(recipe <= {*sources.values()} for sources in all_sources("flights").values())


def test_digests_are_the_same_each_time_and_cheap() -> None:
    """Taking all of them again gives the same, and parses nothing twice."""
    first, begun = all_sources("flights"), time.process_time()

    assert all_sources("flights") == first
    assert time.process_time() - begun < 1.0
    assert len({gate_code_sha256(gate, "flights") for gate in ENTRIES}) == len(ENTRIES)


def test_an_unknown_gate_is_refused() -> None:
    """A gate that does not exist has no digest."""
    with pytest.raises(ConfigError, match="Choose one of: data_contract"):
        gate_sources("latency", "flights")

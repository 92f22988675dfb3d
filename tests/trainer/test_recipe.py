"""A recipe is checked whole before anything starts, and its code has one digest."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.recipe import Card, Column, DataContract, Recipe, Training, cache_folder, code_digest, load_recipe
from validation.errors import ConfigError, RecipeError


class Good:
    """A complete recipe; tests take one thing away from it."""

    name = "good"
    card = Card(question="q", action="a", utility_unit="u", quality_name="AUC", owner="o")
    training = Training(global_batch_size=64, epochs=1)
    contract = DataContract(
        columns={"x": Column(kind="number", minimum=0.0, maximum=1.0)}, label="y", event_time="t", known_after_cutoff=("z",),
        min_rows={"train": 1, "judge": 1}, period={"train": ("2013-01-01", "2013-02-01"), "judge": ("2013-02-01", "2013-03-01")},
        max_gap_days=1.0,
    )  # fmt: skip
    slices = ("s",)
    cluster = "day"
    target_quality = 0.5

    def data(self, split: str) -> None: ...
    def model(self) -> None: ...
    def optimizer(self, model: object) -> None: ...
    def schedule(self, optimizer: object, steps: int) -> None: ...
    def loss(self, model: object, batch: object) -> None: ...
    def scorer(self, model: object) -> None: ...
    def baseline(self, train: object) -> None: ...
    def rule(self, frame: object) -> None: ...
    def outcomes(self, frame: object, scores: object) -> None: ...
    def quality(self, frame: object, scores: object) -> None: ...


WRONG_TRAINING = [
    ({"accumulation": 0}, "accumulation is 0, it has to be a whole number of at least 1"),
    ({"accumulation": 2.0}, r"accumulation is 2\.0"),
    ({"tail": "cut"}, "tail is 'cut', it has to be one of 'keep', 'drop'"),
    ({"autocast": "float8"}, "autocast is 'float8', it has to be one of '', 'bfloat16', 'float16'"),
    ({"autocast": "float16", "loss_scale": 0.0}, r"loss_scale is 0\.0, it has to be positive"),
    ({"autocast": "float16", "loss_scale": float("nan")}, "loss_scale is nan"),
    ({"autocast": "bfloat16", "loss_scale": 1024.0}, "with autocast 'bfloat16': only 'float16'"),
    ({"ema_decay": 1.0}, r"ema_decay is 1\.0, it has to lie between 0 and 1"),
    ({"ema_decay": float("nan")}, "ema_decay is nan"),
    ({"loader_workers": -1}, "loader_workers is -1, it has to be a whole number from 0 to 64"),
    ({"loader_workers": 65}, "loader_workers is 65"),
    ({"loader_workers": True}, "loader_workers is True"),
]


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A team's folder as the current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def load(team: Path, **changes: object) -> Recipe:
    """Load a good recipe with some members replaced, by way of a module in the team's folder."""
    module = team / "team_recipe.py"
    module.write_text("recipe = None\n")
    recipe = Good()
    for name, value in changes.items():
        setattr(recipe, name, value)
    sys.modules.pop("team_recipe", None)
    sys.path.insert(0, str(team))
    __import__("team_recipe").recipe = recipe
    return load_recipe("team_recipe:recipe")


def changed(record: object, **fields: object) -> object:
    return dataclasses.replace(record, **fields)  # type: ignore[type-var]


def test_good_recipe_loads(team: Path) -> None:
    """A complete recipe in the current directory loads."""
    recipe = load(team)

    assert recipe.name == "good"
    assert isinstance(recipe, Recipe)


def test_every_option_of_training_may_be_used(team: Path) -> None:
    """All options at their edges, a recipe with a state and named shard units load."""
    options = {"accumulation": 4, "tail": "drop", "autocast": "float16", "loss_scale": 1.0, "ema_decay": 0.999, "loader_workers": 64}
    recipe = load(team, training=changed(Good.training, **options), state_dict=dict, load_state_dict=len, shard_units=list)

    assert recipe.training.loader_workers == 64


@pytest.mark.parametrize(
    ("path", "said"),
    [
        pytest.param("nothing", r"neither shipped \(flights", id="no colon"),
        pytest.param("a-b:recipe", "package.module:NAME", id="not a module name"),
        pytest.param("m:", "package.module:NAME", id="no name"),
        pytest.param("no_such_team.x:recipe", "no module no_such_team.*install its package", id="no module"),
        pytest.param("json.nothing:recipe", r"no module json\.nothing", id="no submodule"),
        pytest.param("json:recipe", "has no 'recipe'.*json:NAME", id="no such object"),
        pytest.param("json:JSONDecoder", "class JSONDecoder, name an instance", id="a class"),
    ],
)
def test_unusable_paths_name_what_to_do(path: str, said: str, team: Path) -> None:
    """A path that leads to no recipe is refused with the next step."""
    with pytest.raises(RecipeError, match=said):
        load_recipe(path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("1 / 0", r"ZeroDivisionError.*broken_team\.py, line 1", id="exception"),
        pytest.param("import no_such_dependency", "ModuleNotFoundError.*no_such_dependency.*Mend it", id="missing dependency"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", id="exit"),
        pytest.param("def (", "SyntaxError", id="syntax"),
    ],
)
def test_failing_import_says_where(source: str, said: str, team: Path) -> None:
    """Code that fails while it is imported is refused with its own error and line."""
    (team / "broken_team.py").write_text(source + "\n")

    with pytest.raises(RecipeError, match=said):
        load_recipe("broken_team:recipe")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"loss": None}, r"loss\(\) is missing", id="missing function"),
        pytest.param({"rule": 3}, "rule is a int, it has to be a function", id="function of a wrong kind"),
        pytest.param({"data": lambda: None}, r"data\(\) does not take 1 argument", id="wrong arguments"),
        pytest.param({"card": "x"}, "card is a str, it has to be a Card", id="wrong kind"),
        pytest.param({"name": "Good One"}, "name 'Good One' has to match", id="name"),
        pytest.param({"slices": ()}, "slices has to name at least one", id="no slices"),
        pytest.param({"slices": ("a", "a")}, "names a column twice", id="a slice twice"),
        pytest.param({"cluster": ""}, "cluster has to name", id="no cluster"),
        pytest.param({"target_quality": float("nan")}, "target_quality is nan", id="target NaN"),
        pytest.param({"training": changed(Good.training, lanes=6)}, "lanes is 6, it has to be a power of two", id="lanes"),
        pytest.param({"training": changed(Good.training, global_batch_size=7)}, "fewer than its 8 lanes", id="batch"),
        pytest.param({"training": changed(Good.training, epochs=0)}, "epochs is 0", id="epochs"),
        pytest.param({"training": changed(Good.training, clip_norm=float("nan"))}, "clip_norm is nan", id="clip NaN"),
        pytest.param({"training": changed(Good.training, seed=-1)}, "seed is -1", id="seed"),
        *(pytest.param({"training": changed(Good.training, **fields)}, said, id=str(fields)) for fields, said in WRONG_TRAINING),
        pytest.param({"state_dict": dict}, r"load_state_dict\(\) is missing", id="state saved only"),
        pytest.param({"load_state_dict": len}, r"[:;] state_dict\(\) is missing", id="state loaded only"),
        pytest.param({"state_dict": 1, "load_state_dict": len}, "state_dict is a int", id="state not a function"),
        pytest.param({"state_dict": dict, "load_state_dict": lambda: None}, "does not take 1 argument", id="state loaded from nothing"),
        pytest.param({"shard_units": lambda: ()}, r"shard_units\(\) does not take 1 argument", id="units of nothing"),
        pytest.param({"contract": changed(Good.contract, columns={})}, "columns is empty", id="no columns"),
        pytest.param({"contract": changed(Good.contract, known_after_cutoff=("x",))}, "holds x, known only after", id="leak"),
        pytest.param({"contract": changed(Good.contract, label="x")}, "holds x, known only after", id="label as input"),
        pytest.param({"contract": changed(Good.contract, columns={"x": Column(kind="text")})}, "kind number", id="column kind"),
        pytest.param({"contract": changed(Good.contract, columns={"x": 1})}, "has to be a Column", id="not a column"),
        pytest.param(
            {"contract": changed(Good.contract, columns={"x": Column(kind="number", minimum=2.0, maximum=1.0)})},
            "allows nothing", id="range",
        ),
        pytest.param(
            {"contract": changed(Good.contract, columns={"x": Column(kind="number", max_null_share=2.0)})},
            "outside 0..1", id="null share",
        ),
        pytest.param({"contract": changed(Good.contract, event_time="")}, "event_time has to name", id="event time"),
        pytest.param({"contract": changed(Good.contract, min_rows={"train": 1})}, r"min_rows\['judge'\]", id="rows"),
        pytest.param({"contract": changed(Good.contract, period={})}, "ISO times", id="no period"),
        pytest.param(
            {"contract": changed(Good.contract, period=dict.fromkeys(("train", "judge"), ("2013-01-01", "2013-02-01")))},
            "train has to end before judge", id="periods overlap",
        ),
        pytest.param({"contract": changed(Good.contract, max_gap_days=0.0)}, "max_gap_days is 0.0", id="gap"),
    ],
)  # fmt: skip
def test_wrong_members_are_named(changes: dict[str, object], said: str, team: Path) -> None:
    """Every member that cannot work is named with what it has to be."""
    with pytest.raises(RecipeError, match=said):
        load(team, **changes)


def test_all_problems_are_told_at_once(team: Path) -> None:
    """Two mistakes are told in one message."""
    with pytest.raises(RecipeError, match=r"loss\(\) is missing.*cluster has to name.*Mend these members"):
        load(team, loss=None, cluster="")


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEATRIAL_CACHE wins over SEATRIAL_HOME, which wins over the current directory; the folder exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEATRIAL_CACHE", raising=False)
    monkeypatch.delenv("SEATRIAL_HOME", raising=False)
    found = [cache_folder()]
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path / "home"))
    found.append(cache_folder())
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    found.append(cache_folder())

    assert found == [tmp_path / ".seatrial" / "cache", tmp_path / "home" / "cache", tmp_path / "cache"]
    assert all(folder.is_dir() for folder in found)


def test_cache_folder_in_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that cannot be created is an error that names the variable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(ConfigError, match="Set SEATRIAL_CACHE"):
        cache_folder()


def write(team: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = team / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(
    ("edited", "changes"),
    [("own__main", True), ("own__inner", True), ("own__deep", True), ("own__relative", True), ("own__unused", False), ("other", False)],
)
def test_code_digest_follows_own_imports(edited: str, changes: bool, team: Path) -> None:
    """The digest changes with every module of the own package that is imported, however deep, and with no other."""
    write(
        team, own__main="import json, other\nfrom own import inner\nfrom . import relative\n", own__relative="",
        own__inner="def f():\n    import own.deep\n", own__deep="x = 1\n", own__unused="", other="",
    )  # fmt: skip
    (team / "own" / "__init__.py").touch()
    before = code_digest("own.main:recipe")
    write(team, **{edited: "import json, other\nfrom own import inner\nfrom . import relative\n# edited\n"})

    assert (code_digest("own.main:recipe") != before) is changes


def test_code_digest_of_a_single_module_covers_its_folder(team: Path) -> None:
    """A recipe outside any package counts the modules beside it that it imports."""
    write(team, lone_recipe="import lone_helper\n", lone_helper="")
    before = code_digest("lone_recipe:recipe")
    write(team, lone_helper="x = 1\n")

    assert code_digest("lone_recipe:recipe") != before


def test_code_digest_runs_nothing(team: Path) -> None:
    """Taking the digest does not run the recipe, its package or what it imports."""
    write(team, loud__recipe="from loud import inner\nfrom loud.inner import x\n1 / 0\n", loud__inner="1 / 0\n")
    (team / "loud" / "__init__.py").write_text("1 / 0\n")

    assert len(code_digest("loud.recipe:recipe")) == 64
    assert not [name for name in sys.modules if name.startswith("loud")]


def test_code_digest_refuses_what_it_cannot_read(team: Path) -> None:
    """Sources that are not Python have no digest."""
    write(team, unreadable_recipe="def (\n")

    with pytest.raises(RecipeError, match="cannot be read as Python"):
        code_digest("unreadable_recipe:recipe")


def test_contract_and_code_digest_need_no_torch() -> None:
    """The process that decides reads contracts and digests without importing torch."""
    code = "import sys, trainer.recipe as r; r.code_digest('flights'); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

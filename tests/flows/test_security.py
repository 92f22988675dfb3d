"""What is trusted and what is not: recipes, secrets, pickles, paths, addresses (docs/security.md)."""

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mlflow import MlflowClient
from support.rehearsal import MODEL, Part, rehearse

from flows import up
from flows.allowed import check_allowed
from flows.clock import utc_now
from flows.conduct import PLAIN, conduct
from infra import servers
from infra.export import FILES_TAG, files_sha256, load_and_predict
from infra.incidents import keep_incident, load_incident
from infra.journal import Journal
from infra.mirror_layout import checked_run
from infra.registry import Registry
from infra.serving_log import checked_day
from infra.settings import embedded_environment, load_settings
from infra.store import MemoryStore, evidence_key, open_store
from infra.wording import slug
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError, RecipeError, ReleaseError, StoreError, shown_cause
from validation.policy import GATES

REPOSITORY = Path(__file__).parents[2]

# Which recipes may run


def allow(recipe: str, listed: str, home: Path) -> None:
    """Check a recipe against a list."""
    check_allowed(recipe, load_settings(home=home, recipes_allowed=listed))


@pytest.mark.parametrize(
    ("recipe", "listed"),
    [
        ("acme.churn:recipe", ""),
        ("acme.churn:recipe", "*"),
        ("acme.churn:recipe", "flights, acme.churn:recipe"),
        ("acme.churn:recipe", "acme.*"),
        ("acme.churn:recipe", "acme.churn:*"),
        ("flights", "trainer.recipes.flights:recipe"),
        ("trainer.recipes.flights:recipe", "flights"),
    ],
)
def test_a_listed_recipe_may_run(recipe: str, listed: str, tmp_path: Path) -> None:
    """By its import path, its short name, or the beginning of its path; an empty list allows all."""
    allow(recipe, listed, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "listed"),
    [
        ("acme.churn:recipe", "flights"),
        ("acme.churn:recipe", "acme.churn:other"),
        ("acmes.churn:recipe", "acme.*"),
        ("acme.churns:recipe", "acme.churn:*"),
        ("acme.churn.evil:recipe", "acme.churn:*"),
        ("bytes", "flights"),
    ],
)
def test_any_other_recipe_is_refused_with_what_is_allowed(recipe: str, listed: str, tmp_path: Path) -> None:
    """Names that only begin alike do not count, and the message says how to allow it."""
    with pytest.raises(RecipeError, match=r"SEATRIAL_RECIPES_ALLOWED allows .*add \S+:recipe to that variable"):
        allow(recipe, listed, tmp_path)


@pytest.mark.parametrize("listed", ["acme*", "acme.churn", "*.churn:recipe", "acme.*.churn:*", "fligths", "../x:recipe"])
def test_a_list_that_cannot_be_meant_allows_nothing(listed: str, tmp_path: Path) -> None:
    """A "*" in the middle of a name would allow more than anybody reads in it; a typing error would allow nothing without a word."""
    with pytest.raises(ConfigError, match=r"Write package\.module:NAME"):
        allow("acme.churn:recipe", listed, tmp_path)


@pytest.mark.parametrize("command", [["release"], ["check"], ["train"]])
def test_no_line_of_a_recipe_that_is_not_allowed_runs(command: list[str], tmp_path: Path) -> None:
    """Exit code 2 and the list, before the module is imported or anything is written."""
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nrecipe = None\n")
    environment = {**os.environ, "SEATRIAL_HOME": str(tmp_path / "home"), "SEATRIAL_RECIPES_ALLOWED": "flights, acme.*"}
    words = [sys.executable, "-m", "flows.cli", *command, "stranger:recipe"]
    run = subprocess.run(words, cwd=tmp_path, env=environment | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60)

    assert run.returncode == 2, run.stderr
    assert "SEATRIAL_RECIPES_ALLOWED allows flights, acme.*" in run.stderr
    assert not (tmp_path / "ran").exists()
    assert not [*tmp_path.glob("home/runs/*"), *tmp_path.glob("home/store/releases/*")]


# Secrets

SECRETS = {
    "AWS_ACCESS_KEY_ID": "PLANTEDACCESSKEYID",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-access-key",
    "AWS_SESSION_TOKEN": "planted-session-token",
    "SEATRIAL_SEAL_KEY": "c0ffee12" * 8,
    "SEATRIAL_NOTIFY_WEBHOOK": "https://hooks.example/planted-webhook-token",
    "PREFECT_API_KEY": "planted-prefect-api-key",
    "PREFECT_API_AUTH_STRING": "planted-crew:planted-auth-string",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
    "MLFLOW_TRACKING_USERNAME": "planted-mlflow-user",
}
PASSWORD = "planted-hunter2"
PLANTED = [*SECRETS.values(), "planted-auth-string", "planted-webhook-token", PASSWORD]


def private_key(folder: Path) -> tuple[Path, str]:
    """A signing key, and a line of it that nobody else may have."""
    path = folder / "signing.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(path)], check=True, capture_output=True)
    path.chmod(0o600)
    return path, path.read_text().splitlines()[1]


def told(words: str, secrets: list[str]) -> list[str]:
    """Planted secrets that a text shows."""
    return [secret for secret in secrets if secret in words]


def left_in(folder: Path, secrets: list[str]) -> list[tuple[str, str]]:
    """Files below a folder that hold a planted secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [(path.name, secret) for path in files for secret in secrets if secret.encode() in path.read_bytes()]


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """An environment with a secret in every variable that may carry one."""
    names = ("SEATRIAL_STORE", "SEATRIAL_CACHE", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")
    mine = {name: value for name, value in os.environ.items() if name not in names}
    limits = {"SEATRIAL_STORE_ATTEMPTS": "1", "SEATRIAL_STORE_CONNECT_TIMEOUT_S": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    where = {"SEATRIAL_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "examples/digits")))}
    return mine | SECRETS | limits | where


def seatrial(environment: dict[str, str], *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One command."""
    command = [sys.executable, "-m", "flows.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


FAILING = {
    "registry refuses the connection": {"SEATRIAL_MLFLOW_TRACKING_URI": f"http://crew:{PASSWORD}@127.0.0.1:9"},
    "registry of no known kind": {"SEATRIAL_MLFLOW_TRACKING_URI": f"ftp://crew:{PASSWORD}@127.0.0.1/x"},
    "registry's address is broken": {"SEATRIAL_MLFLOW_TRACKING_URI": f"http://crew:{PASSWORD}@"},
    "store's address has a password": {"SEATRIAL_STORE": "s3://trial/x", "SEATRIAL_STORE_ENDPOINT": f"http://crew:{PASSWORD}@127.0.0.1:9"},
    "store refuses the connection": {"SEATRIAL_STORE": "s3://trial/x", "SEATRIAL_STORE_ENDPOINT": "http://127.0.0.1:9"},
    "store is no store": {"SEATRIAL_STORE": f"https://crew:{PASSWORD}@127.0.0.1/x"},
    "signing key is no key": {"SEATRIAL_SIGNING_KEY": "{key}"},
}


@pytest.mark.parametrize("failing", FAILING)
def test_no_failing_path_shows_a_secret(planted: dict[str, str], tmp_path: Path, failing: str) -> None:
    """Refused connections, bad addresses, a broken key: the message names the variable, never what is secret in it."""
    key, line = private_key(tmp_path)
    key.write_text(key.read_text().replace("PRIVATE", "PRIVAT"))
    given = {name: value.format(key=key) for name, value in FAILING[failing].items()}
    run = seatrial(planted | given, "rollback", "boat", "--reason", "it is bad", folder=tmp_path)

    assert run.returncode in (1, 2), run.stderr
    assert run.stderr.startswith("seatrial: ") or "\nseatrial: " in run.stderr, run.stderr
    assert told(run.stdout + run.stderr, [*PLANTED, line]) == []
    assert left_in(tmp_path / "home", [*PLANTED, line]) == []


@pytest.mark.slow
def test_training_and_its_traces_hold_no_secret(planted: dict[str, str], tmp_path: Path) -> None:
    """A run with a killed rank: output, checkpoints, flight records, logs and the incident's folder."""
    _, line = private_key(tmp_path)
    words = ["train", "digits:recipe", "--world-size", "2", "--steps", "12", "--fault", "kill:rank=1,step=7,phase=backward", "--json"]
    run = seatrial(planted | {"SEATRIAL_SIGNING_KEY": str(tmp_path / "signing.pem")}, *words, folder=tmp_path)

    assert run.returncode == 0, run.stderr
    assert told(run.stdout + run.stderr, [*PLANTED, line]) == []
    assert [*(tmp_path / "home").glob("runs/*/checkpoints/*/MANIFEST.json")]
    assert left_in(tmp_path / "home", [*PLANTED, line]) == []


def test_a_release_leaves_no_secret_in_evidence_reports_or_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The whole machinery with a secret in every variable: store, journal, report, plots, MLflow's database and artifacts, logs."""
    key, line = private_key(tmp_path)
    for name, value in (SECRETS | {"SEATRIAL_SIGNING_KEY": str(key)}).items():
        monkeypatch.setenv(name, value)
    settings = load_settings(home=tmp_path / "home")
    os.environ.update(embedded_environment(settings))
    for number, floats in enumerate(({}, {"scaling": 0.1})):
        release = rehearse(settings, open_store(settings), Registry(settings), Part(floats=floats, weights=bytes([number])), number=number)
        started = {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}
        release.journal.append("started", started, time_utc=utc_now())
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")

    assert left_in(tmp_path / "home", [*PLANTED, line]) == []
    assert told("".join(capfd.readouterr()) + caplog.text, [*PLANTED, line]) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://crew:hunter2@host:9/x failed", "at http://…@host:9/x failed"),
        ("postgresql+psycopg2://crew:p@ss@host/db", "postgresql+psycopg2://…@host/db"),
        ("'https://token@host'", "'https://…@host'"),
        ("//crew:pa/ss@host", "//…@host"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("models:/boat@champion and ada@example.org", "models:/boat@champion and ada@example.org"),
    ],
)
def test_an_error_shows_no_user_and_password_of_an_address(text: str, shown: str) -> None:
    """Whatever library wrote the address into its message, ours goes without."""
    assert str(ReleaseError(text)) == shown


def test_a_cause_that_shows_a_password_is_left_out_of_the_traceback() -> None:
    """Prefect logs tracebacks with their causes: one that names a password is no cause."""
    clean, dirty = ValueError("nothing"), ValueError("http://crew:hunter2@host")

    assert (shown_cause(clean), shown_cause(dirty)) == (clean, None)


# Pickles and other ways to run what was read

RUNS = {
    "pickle": ("load", "loads", "Unpickler", "_Unpickler"), "cloudpickle": ("load", "loads"), "dill": ("load", "loads"),
    "joblib": ("load",), "marshal": ("load", "loads"), "shelve": ("open",), "torch": ("load",),
    "yaml": ("load", "unsafe_load", "full_load"), "pandas": ("read_pickle",), "pd": ("read_pickle",), "runpy": ("run_path", "run_module"),
}  # fmt: skip
NAMES = ("eval", "exec", "compile", "__import__")
SAFE = {  # place -> why nothing from outside gets there
    "trainer/checkpoint.py: pickle.loads": "its sha256 is in a manifest whose seal was verified with the key",
    "trainer/loader.py: pickle.loads": "an error of a worker of our own, over an anonymous pipe",
    "trainer/looking.py: pickle.loads": "the result of a child of our own, over an anonymous pipe",
    "trainer/leader.py: pickle.loads": "a call of the flow process, over a socket pair that it made",
    "trainer/wires.py: pickle.loads": "messages between processes of one tree, over socket pairs",
    "trainer/ranks.py: pickle.Unpickler": "the warm server's answer over a socket pair; knows no class of torch",
    "infra/dump_raw.py: pickle.Unpickler": "knows containers, strings and numbers alone; whatever names a class is refused",
    "infra/dump_raw.py: pickle._Unpickler": "the same, counting what it makes",
}


def dangerous(path: Path) -> set[str]:
    """Calls and bases in a module that run what they read, as "module.name"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in RUNS.get(node.value.id, ()):
            found.add(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module in RUNS:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name in RUNS[node.module]}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
            found.add(node.func.id)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell") and not _is_false(node.value):
            found.add(f"{node.arg}=")
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and _is_false(node.value):
            found.add("weights_only=False")
    return found


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_nothing_is_unpickled_or_run_outside_the_list() -> None:
    """Each place that could run what it reads is named with its reason; a new one has to be added here by hand."""
    files = [path for package in ("flows", "infra", "trainer", "validation") for path in (REPOSITORY / package).rglob("*.py")]
    found = {f"{path.relative_to(REPOSITORY)}: {name}" for path in files for name in dangerous(path)}

    assert found == set(SAFE)


def test_the_scan_sees_what_it_looks_for(tmp_path: Path) -> None:
    """Seen failing: each kind is found."""
    lines = [
        "import pickle, yaml, torch", "from pickle import loads", "pickle.load(f)", "yaml.load(x)", "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)", "eval(x)", "subprocess.run(x, shell=True)", "np.load(p, allow_pickle=False)",
    ]  # fmt: skip
    (tmp_path / "bad.py").write_text("\n".join(lines))

    assert dangerous(tmp_path / "bad.py") == {
        "pickle.loads", "pickle.load", "yaml.load", "torch.load", "weights_only=False", "allow_pickle=", "eval", "shell=",
    }  # fmt: skip


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's own
def test_a_model_with_a_pickle_in_the_registry_is_refused(tmp_path: Path) -> None:
    """A version made by somebody else, its pickled model under a digest of its own: it is not loaded, and nothing ran."""
    settings = load_settings(home=tmp_path / "home")
    Registry(settings)
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "python_model.pkl").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    flavour = {"loader_module": "mlflow.pyfunc.model", "python_model": "python_model.pkl", "python_version": "3.11.0"}
    (folder / "MLmodel").write_text(yaml.safe_dump({"flavors": {"python_function": flavour}, "mlflow_version": "3.17.2"}))
    uri = settings.mlflow_tracking_uri
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_registered_model("boat")
    tags = {FILES_TAG: files_sha256(folder.as_uri(), tracking_uri=uri)}
    client.create_model_version("boat", source=folder.as_uri(), tags=tags)
    rows = np.zeros((2, 2), dtype=np.float32)

    with pytest.raises(Exception, match=r"(?i)pickle"):
        load_and_predict("models:/boat/1", rows, sha256=tags[FILES_TAG], tracking_uri=uri)
    assert not (tmp_path / "ran").exists()


# Paths

OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a\x00b", ".hidden", "a\\..\\b", "x" * 5000, "", "ü", "a\nb"]


@pytest.mark.parametrize("key", OUTSIDE)
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_no_key_leaves_the_store(tmp_path: Path, kind: str, key: str) -> None:
    """Neither written nor read: a key is segments of plain letters."""
    store = open_store(load_settings(home=tmp_path, store=str(tmp_path / "store"))) if kind == "folder" else MemoryStore()
    for ask in (
        lambda: store.put_new(key, b"x"),
        lambda: store.get(key),
        lambda: store.replace(key, b"x", None),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="not a valid object key"):
            ask()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name != ""])
def test_no_name_of_a_run_a_release_or_a_day_leaves_its_folder(name: str) -> None:
    """Names that become keys and folders are checked where they come in."""
    with pytest.raises(ConfigError):
        checked_run(name)
    with pytest.raises(ConfigError):
        Journal(MemoryStore(), name)
    with pytest.raises(ConfigError):
        checked_day(name)
    with pytest.raises(EvidenceError):
        evidence_key(name)


@pytest.mark.parametrize("name", ["../../evil.json", "/tmp/evil.json", "a/../../evil.json"])
def test_an_incident_that_names_files_elsewhere_is_not_fetched(tmp_path: Path, name: str) -> None:
    """FILES.json is read from the store: a name in it that leads elsewhere writes nothing."""
    store = MemoryStore()
    record = {"finding": {"kind": "hang"}, "detected_ns": 1, "number": 1, "mitigation": {"text": "none"}}
    store.put_new("incidents/r/i/incident.json", canonical_json(record))
    store.put_new("incidents/r/i/FILES.json", canonical_json({name: {"bytes": 1, "sha256": "0" * 64}}))
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)

    with pytest.raises(ReleaseError):
        load_incident(store, "incidents/r/i", into=into)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_link_in_an_incidents_folder_is_not_followed_into_the_store(tmp_path: Path) -> None:
    """Whoever can make a link in a run's folder does not get other files of this machine into the store."""
    (tmp_path / "secret").write_text(PASSWORD)
    folder = tmp_path / "incident"
    folder.mkdir()
    record = {"finding": {"kind": "hang"}, "detected_ns": 1, "number": 1, "mitigation": {"text": "none"}}
    (folder / "incident.json").write_bytes(canonical_json(record))
    (folder / "rank0.json").symlink_to(tmp_path / "secret")
    store = MemoryStore()
    key = keep_incident(store, "run", folder)

    assert store.list(key) == [f"{key}/FILES.json", f"{key}/incident.json"]


def test_a_plots_title_cannot_lead_out_of_the_reports_folder() -> None:
    """Titles become file names: letters, digits and dashes are left of them."""
    for title in ("../../etc/passwd", "/abs", "a\x00b", "x" * 500, "..", ""):
        name = slug(title)
        assert "/" not in name
        assert "\x00" not in name
        assert not name.startswith(".")
        assert len(name) < 200


# Addresses


def test_servers_listen_on_loopback_only(tmp_path: Path) -> None:
    """Every server that is started on this machine gets 127.0.0.1 on its command line, and MLflow knows no other Host."""
    settings = load_settings(home=tmp_path)
    own = servers._embedded(tmp_path, settings, servers.Ports(prefect=4201, mlflow=5001))
    commands = {command.name: list(command.words) for command in servers._commands(own, settings)}

    for words in commands.values():
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert "0.0.0.0" not in " ".join(words)
    assert "127.0.0.1:5001,localhost:5001" in commands["mlflow"]


def test_no_command_line_carries_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of a machine can read command lines: database addresses and keys are variables."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(home=tmp_path, mlflow_tracking_uri=f"postgresql+psycopg2://crew:{PASSWORD}@127.0.0.1/mlflow")
    own = servers._embedded(tmp_path, settings, servers.Ports(prefect=4201, mlflow=5001))

    for command in servers._commands(own, settings):
        assert told(" ".join(command.words) + repr(command), PLANTED) == []
    assert told("\n".join(up.addresses(own, postgres=True)) + repr(own), PLANTED) == []


def test_prefects_own_server_of_a_command_is_on_loopback() -> None:
    """Without PREFECT_API_URL Prefect starts one for the length of a command; its default is loopback."""
    from prefect.settings import get_current_settings

    assert get_current_settings().server.api.host == "127.0.0.1"

"""Servers of this machine: they answer, keep to loopback, end with their starter, and say what is missing."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import psutil
import pytest

from infra import server_postgres, servers
from infra.registry import Registry
from infra.server_process import LOOPBACK, Command, Server, ServerError, free_port, require_port
from infra.settings import load_settings
from infra.store import open_store
from validation.errors import ConfigError, StoreError

Patch = pytest.MonkeyPatch
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# a command that starts another one in a session of its own, and ignores being asked to end
STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"
)


@pytest.fixture(scope="module")
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the database's user can reach; pytest's own is closed to all but root, and PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        yield tmp_path_factory.mktemp("stack")
        return
    folder = Path(tempfile.mkdtemp(prefix="sea-trial-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def on_postgres(open_folder: Path) -> Iterator[servers.Stack]:
    """The whole stack, with its servers."""
    _need_postgres()
    with servers.stack(open_folder / "a stack", postgres=True) as own:
        yield own


def _need_postgres() -> None:
    try:
        server_postgres.find_binaries()
    except ConfigError:
        pytest.skip("no PostgreSQL server is installed")


def command(folder: Path, *words: str, **given: object) -> Command:
    """A command named "thing" in a folder."""
    return Command(name="thing", words=words, environment=dict(os.environ), folder=folder, **given)  # type: ignore[arg-type]


def below(pid: int) -> list[psutil.Process]:
    """Everything that runs below a process."""
    return psutil.Process(pid).children(recursive=True)


def eventually(condition: object, timeout_s: float = 10.0) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(found)


def keeper_of(server: Server) -> int:
    """The pid of a server's keeper."""
    return server._keeper.pid


def test_a_server_ends_with_all_it_started(tmp_path: Path) -> None:
    """A command that ignores SIGTERM, and a child of it in another session, are gone after `end`."""
    server = Server(command(tmp_path, sys.executable, "-c", STUBBORN, grace_s=0.5))
    assert eventually(lambda: len(below(keeper_of(server))) == 2)
    started = below(keeper_of(server))

    server.end()

    assert not server.is_alive
    assert not [process for process in started if process.is_running()]


def test_a_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the starting process: nothing it can do, and yet nobody is left."""
    code = (
        "import os, signal, sys; from pathlib import Path; from infra.server_process import Command, Server; "
        f"Server(Command(name='thing', words=[sys.executable, '-c', {STUBBORN!r}], environment=dict(os.environ), "
        f"folder=Path({str(tmp_path)!r}), grace_s=0.5)); sys.stdin.read()"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert eventually(lambda: len(below(starter.pid)) == 3)
    started = below(starter.pid)

    starter.kill()
    starter.communicate()

    assert eventually(lambda: not [process for process in started if process.is_running()])


def test_a_killed_keeper_takes_its_command_along(tmp_path: Path) -> None:
    """The keeper is no weak link: the kernel ends the command when it dies."""
    server = Server(command(tmp_path, *SLEEP))
    assert eventually(lambda: below(keeper_of(server)))
    [child] = below(keeper_of(server))

    os.kill(keeper_of(server), signal.SIGKILL)

    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    """Exit code and last lines stand in the error."""
    server = Server(command(tmp_path, sys.executable, "-c", "print('no such thing'); raise SystemExit(7)"))

    with pytest.raises(ServerError, match=r"(?s)thing ended with exit code 7 .*no such thing"):
        server.wait(lambda: False, 20.0)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    """Waiting has an end, and the error names the log."""
    server = Server(command(tmp_path, *SLEEP))

    with pytest.raises(ServerError, match=r"did not answer within 0 s.*"):
        server.wait(lambda: False, 0.3)
    server.end()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """Nothing is started next to somebody else's server; the message says how to find it."""
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]

        with (
            pytest.raises(ConfigError, match=f"port {port} .* meant for Prefect.*ss -ltnp"),
            servers.stack(tmp_path / "new", ports=servers.Ports(prefect=port)),
        ):
            pass
    assert not (tmp_path / "new").exists()


def test_a_free_port_is_given_as_it_is() -> None:
    """A port that nobody listens on is taken as asked for; 0 means any."""
    port = free_port()

    assert require_port(port, "a test") == port
    assert require_port(0, "a test") > 0


def test_without_postgres_it_says_what_to_install(tmp_path: Path, monkeypatch: Patch) -> None:
    """A machine without PostgreSQL."""
    monkeypatch.setattr(server_postgres, "_DEBIAN", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="apt-get install postgresql"), servers.stack(tmp_path / "new", postgres=True):
        pass


def test_without_moto_it_says_what_to_do(open_folder: Path, monkeypatch: Patch) -> None:
    """moto is a tool of development: without it an endpoint has to be named."""
    _need_postgres()
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(ConfigError, match=r"moto\[server\].*SEATRIAL_STORE_ENDPOINT"), servers.stack(open_folder / "x", postgres=True):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become another user")
def test_a_folder_that_the_databases_user_cannot_reach_is_named(tmp_path: Path) -> None:
    """As root PostgreSQL runs as another user: the message names the folder that is closed to it."""
    _need_postgres()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    with pytest.raises(ConfigError, match=r"may not enter .*--into /var/lib/sea-trial"):
        server_postgres.prepare_cluster(closed / "postgres")


def test_the_stack_says_nothing_of_its_secrets(on_postgres: servers.Stack) -> None:
    """Password and keys are in environments only: not in the record's text, not in a command line, not in a log."""
    assert on_postgres.cluster is not None
    secrets = (on_postgres.cluster.password, on_postgres.environment["AWS_SECRET_ACCESS_KEY"])
    lines = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True) if process.is_running()]
    logs = [path.read_text(errors="replace") for path in on_postgres.folder.rglob("*.log")]

    assert len(logs) == 4
    assert not [text for text in (repr(on_postgres), *lines, *logs) for secret in secrets if secret in text]


def test_only_loopback_is_listened_on(on_postgres: servers.Stack) -> None:
    """No server can be reached from another machine."""
    links = [link for process in psutil.Process().children(recursive=True) for link in process.net_connections("inet")]
    listening = {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}

    assert listening == {LOOPBACK}


def test_both_servers_keep_to_postgres(on_postgres: servers.Stack) -> None:
    """Prefect's flow runs and MLflow's experiments are tables of PostgreSQL."""
    assert on_postgres.cluster is not None
    tables = {name: _asked(on_postgres, name, "SELECT tablename FROM pg_tables") for name in ("prefect", "mlflow")}

    assert "flow_run" in tables["prefect"]
    assert "experiments" in tables["mlflow"]


def _asked(own: servers.Stack, database: str, query: str) -> list[str]:
    assert own.cluster is not None
    return server_postgres._client(own.cluster, "psql", "-d", database, "-Atc", query).stdout.split()


def test_the_database_asks_for_its_password(on_postgres: servers.Stack) -> None:
    """Another process of this machine, even of the same user, is not let in without it."""
    psycopg2 = pytest.importorskip("psycopg2")
    cluster = on_postgres.cluster
    assert cluster is not None

    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(host=LOOPBACK, port=cluster.port, user="seatrial", password="guess", dbname="mlflow")


def test_a_foreign_host_is_refused_by_mlflow(on_postgres: servers.Stack) -> None:
    """A page of another site cannot make a browser ask MLflow by a name of its own."""
    answers = [
        httpx.get(f"{on_postgres.mlflow_url}/api/2.0/mlflow/experiments/get?experiment_id=0", headers={"Host": host})
        for host in ("evil.example", "localhost:1")
    ]

    assert [answer.status_code for answer in answers] == [403, 403]


def test_a_registry_on_the_stack_puts_files_into_s3(on_postgres: servers.Stack, tmp_path: Path, monkeypatch: Patch) -> None:
    """With the stack's environment, MLflow's runs are in PostgreSQL, their files and the evidence in the bucket."""
    for name, value in on_postgres.environment.items():
        monkeypatch.setenv(name, value)
    registry, store = Registry(load_settings()), open_store(load_settings())
    page = tmp_path / "report.html"
    page.write_text("<p>six of six")
    run = registry.start_run("digits", "digits-1")
    registry.publish(run, page=page, plots=tmp_path / "none", evidence={"scaling": b"{}"}, metrics={"m": 1.0}, tags={})
    store.put_new("evidence/x", b"x")

    listing = boto3.client("s3", endpoint_url=on_postgres.s3_url).list_objects_v2(Bucket=servers.BUCKET)
    keys = {item["Key"] for item in listing["Contents"]}
    assert {f"mlflow/{run}/artifacts/report.html", f"mlflow/{run}/artifacts/evidence/scaling.json", "evidence/evidence/x"} <= keys
    assert "sea-trial" in _asked(on_postgres, "mlflow", "SELECT name FROM experiments")


def test_a_cluster_is_taken_up_again(on_postgres: servers.Stack) -> None:
    """The database restarted: the same data, the same port, and both servers answer again after their broken connections."""
    on_postgres.stop("postgres")
    on_postgres.start_again("postgres")

    assert eventually(lambda: httpx.post(f"{on_postgres.prefect_url}/api/flow_runs/filter", json={}).status_code == 200, 30.0)
    assert eventually(
        lambda: httpx.get(f"{on_postgres.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1").status_code == 200, 30.0
    )


@pytest.mark.slow
def test_prefect_asks_who_comes_in(tmp_path: Path, monkeypatch: Patch) -> None:
    """With Prefect's own authentication in the environment: 401 without it, 200 with it, and health stays open for probes."""
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "trial:a password")
    with servers.stack(tmp_path / "a stack") as own:
        url = f"{own.prefect_url}/api/flow_runs/filter"
        answers = [httpx.post(url, json={}, auth=auth) for auth in (None, ("trial", "guess"), ("trial", "a password"))]

    assert [answer.status_code for answer in answers] == [401, 401, 200]


def test_a_registry_that_refuses_connections_is_a_clear_error(tmp_path: Path, monkeypatch: Patch) -> None:
    """Nobody listens at MLflow's address: an error that names the setting, and says that what serves is not touched."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    settings = load_settings(home=tmp_path, mlflow_tracking_uri=f"http://{LOOPBACK}:{free_port()}")

    with pytest.raises(StoreError, match=r"serving pointer is not touched.*Check SEATRIAL_MLFLOW_TRACKING_URI"):
        Registry(settings)

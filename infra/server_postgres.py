"""A PostgreSQL cluster of its own: made once, for one owner with a made-up password, reached over loopback only. Linux only."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from infra.server_process import LOOPBACK, Command, Server, require_port
from validation.errors import ConfigError

OWNER = "seatrial"
DATABASES = ("prefect", "mlflow")
START_S = 120.0  # after an unclean end it reads its log first
_DEBIAN = Path("/usr/lib/postgresql")
_SOCKET_NAME_MAX = 100  # a Unix socket's path holds 107 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster's place and address."""

    folder: Path
    binaries: Path
    port: int
    password: str = field(repr=False)
    user: str  # whom the server runs as; "" = this user

    def address(self, scheme: str, database: str) -> str:
        """The address of a database, password included: for environments, never for command lines or logs."""
        return f"{scheme}://{OWNER}:{self.password}@{LOOPBACK}:{self.port}/{database}"


def find_binaries() -> Path:
    """The newest PostgreSQL's folder of programs. Raises ConfigError when there is none."""
    found = sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]) if path.parts[-3].isdigit() else 0)
    if found:
        return found[-1].parent
    if (on_path := shutil.which("postgres")) and shutil.which("initdb"):
        return Path(on_path).resolve().parent
    raise ConfigError(
        "no PostgreSQL server is installed (no postgres and initdb in /usr/lib/postgresql/*/bin or on PATH), so nothing was started. "
        "Install one (Debian: apt-get install postgresql), or leave out --postgres."
    )


def prepare_cluster(folder: Path, *, port: int = 0) -> Cluster:
    """Make the cluster if it is not there; nothing is started.

    As root it belongs to the user postgres (else nobody), because PostgreSQL's server refuses to run as root.
    Raises: ConfigError when there is no PostgreSQL, or that user cannot reach the folder.
    """
    binaries, user = find_binaries(), _server_user()
    folder.mkdir(parents=True, exist_ok=True)
    if user:
        _require_reachable(folder, user)
        _give(folder, user)
    folder.chmod(0o700)
    secret = folder / "password"
    if not (folder / "data" / "PG_VERSION").exists():
        shutil.rmtree(folder / "data", ignore_errors=True)  # half made
        _write_secret(secret, user)
        words = [
            "initdb",
            "-D",
            str(folder / "data"),
            "-U",
            OWNER,
            "-E",
            "UTF8",
            "--no-locale",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
        ]
        _run(binaries, words, folder, user)
    return Cluster(folder=folder, binaries=binaries, port=require_port(port, "PostgreSQL"), password=secret.read_text().strip(), user=user)


def start_cluster(cluster: Cluster) -> Server:
    """Start the server and make the databases that are not there; returns when they can be used."""
    sockets = str(cluster.folder) if len(str(cluster.folder)) < _SOCKET_NAME_MAX else ""
    settings = {
        "port": cluster.port, "listen_addresses": LOOPBACK, "unix_socket_directories": sockets, "unix_socket_permissions": "0700",
        "max_connections": 200, "logging_collector": "off",
    }  # fmt: skip
    words = [str(cluster.binaries / "postgres"), "-D", str(cluster.folder / "data")]
    words += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    server = Server(
        Command(
            name="postgres", words=words, environment=_plain_environment(), folder=cluster.folder, user=cluster.user,
            signum=signal.SIGINT, grace_s=30.0,  # SIGINT: a fast shut-down, clients are cut off
        )
    )  # fmt: skip
    try:
        server.wait(lambda: _is_ready(cluster), START_S)
    except BaseException:
        server.end()
        raise
    return server


def _is_ready(cluster: Cluster) -> bool:
    """Whether it answers and has the databases; makes those that are missing."""
    listing = _client(cluster, "psql", "-d", "postgres", "-Atc", "SELECT datname FROM pg_database")
    present = listing.stdout.split()
    return listing.returncode == 0 and all(name in present or _client(cluster, "createdb", name).returncode == 0 for name in DATABASES)


def _client(cluster: Cluster, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    login = ["-h", LOOPBACK, "-p", str(cluster.port), "-U", OWNER, "-w"]
    environment = {**_plain_environment(), "PGPASSWORD": cluster.password, "PGCONNECT_TIMEOUT": "5"}
    command = [str(cluster.binaries / program), *login, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")


def _server_user() -> str:
    if os.geteuid() != 0:
        return ""
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in known:
            return name
    raise ConfigError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody. Start as an ordinary user.")


def _require_reachable(folder: Path, user: str) -> None:
    for above in reversed(folder.resolve().parents):
        if not _may_enter(above, user):
            raise ConfigError(
                f"PostgreSQL runs as user {user} here, because it refuses to run as root, and {user} may not enter {above}. Nothing was "
                f"started. Give a folder that {user} can reach (seatrial up --postgres --into /var/lib/sea-trial), or start as an ordinary "
                "user."
            )


def _may_enter(folder: Path, user: str) -> bool:
    entry, found = pwd.getpwnam(user), folder.stat()
    groups = set(os.getgrouplist(user, entry.pw_gid))
    shift = 6 if found.st_uid == entry.pw_uid else 3 if found.st_gid in groups else 0
    return bool(found.st_mode >> shift & 1)


def _give(path: Path, user: str) -> None:
    shutil.chown(path, user, pwd.getpwnam(user).pw_gid)


def _write_secret(path: Path, user: str) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(24) + "\n")
    if user:
        _give(path, user)


def _run(binaries: Path, words: list[str], folder: Path, user: str) -> None:
    entry = pwd.getpwnam(user) if user else None
    run = subprocess.run(
        [str(binaries / words[0]), *words[1:]], cwd=folder, env=_plain_environment(), capture_output=True, text=True, timeout=120,
        user=entry.pw_uid if entry else None, group=entry.pw_gid if entry else None, extra_groups=[] if entry else None,
    )  # fmt: skip
    if run.returncode:
        raise ConfigError(
            f"{words[0]} could not make a cluster in {folder}: {run.stderr.strip()[-500:]}\nNothing was started. Give another folder, or "
            "free space on this one."
        )


def _plain_environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}

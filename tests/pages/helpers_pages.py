"""One promoted and one refused release of the example recipe, on servers that stay up, and a browser to look at their pages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import BrowserContext, Page, Response

from infra.servers import Stack, stack
from infra.settings import load_settings

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
COMMAND_S = 600  # an overloaded machine's; an idle one needs a minute
LOAD_MS = 60_000
# Small and honest: every gate really runs. The floor is low because a step of this model takes a millisecond.
POLICY = """
world_sizes: [1, 2]
scaling: {efficiency_floor: 0.01, oversubscribed_floor: 0.01, confidence: 0.5, repeats: 4, steps: 8, warmup_steps: 2, idle_share_max: 0.7}
kill_and_resume: {steps: 20}
slice_quality: {min_n: 60, min_coverage: 0.7, latency_p95_ms: 500}
"""
PASSWORD = "planted-hunter2"
SECRETS = {  # in the environment of both releases; found nowhere afterwards
    "AWS_ACCESS_KEY_ID": "PLANTEDACCESSKEYID",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-access-key",
    "PREFECT_API_KEY": "planted-prefect-api-key",
    "SEATRIAL_SEAL_KEY": "c0ffee12" * 8,
    "SEATRIAL_NOTIFY_WEBHOOK": "https://hooks.example/planted-webhook-token",
}


@dataclass(frozen=True)
class Told:
    """A release: its document, its flow run, and all that the command said."""

    document: Mapping[str, Any]
    flow_run: str
    said: str


@dataclass
class Quay:
    """Servers, the two releases, and what they left."""

    own: Stack
    home: Path
    releases: dict[str, Told] = field(default_factory=dict)

    def release(self, name: str, *options: str, code: int) -> None:
        """Run `seatrial release` against the servers, with a secret in every variable that may carry one."""
        with_password = self.own.mlflow_url.replace("//", f"//crew:{PASSWORD}@")
        environment = self.own.full_environment() | SECRETS | {"SEATRIAL_MLFLOW_TRACKING_URI": with_password, "PYTHONPATH": str(REPOSITORY)}
        environment |= {"MLFLOW_TRACKING_URI": with_password}
        command = [sys.executable, "-m", "flows.cli", "release", "digits:recipe", "--policy", str(self.home / "policy.yaml"), "--json"]
        run = subprocess.run(
            [*command, *options], cwd=REPOSITORY / "examples" / "digits", env=environment, capture_output=True, text=True,
            timeout=COMMAND_S,
        )  # fmt: skip
        assert run.returncode == code, run.stderr[-3000:]
        document = json.loads(run.stdout)
        state = {"promoted": "Promoted", "fell_back": "Fell back"}[document["decision"]]
        self.releases[name] = Told(document=document, flow_run=self._flow_run(state), said=run.stdout + run.stderr)

    def _flow_run(self, state: str) -> str:
        found = self.ask("flow_runs/filter", {"flow_runs": {"state": {"name": {"any_": [state]}}}})
        return str(found[0]["id"])

    def artifact(self, name: str, key: str) -> str:
        """The address of an artifact's page of a release."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [self.releases[name].flow_run]}, "key": {"any_": [key]}}}
        return f"{self.own.prefect_url}/artifacts/artifact/{self.ask('artifacts/filter', wanted)[0]['id']}"

    def version_page(self, name: str) -> str:
        """The address of a candidate's page in MLflow."""
        return f"{self.own.mlflow_url}/#/models/digits/versions/{self.releases[name].document['candidate_version']}"

    def run_page(self, name: str) -> str:
        """The address of a flow run's page in Prefect."""
        return f"{self.own.prefect_url}/runs/flow-run/{self.releases[name].flow_run}"

    def ask(self, path: str, body: Any) -> Any:
        """What Prefect's server answers."""
        return httpx.post(f"{self.own.prefect_url}/api/{path}", json=body, timeout=60).raise_for_status().json()


@contextmanager
def quay(folder: Path) -> Iterator[Quay]:
    """Both servers with both releases; everything ends afterwards."""
    home = folder / "the home"
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    for name in ("SEATRIAL_STORE", "SEATRIAL_CACHE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME"):
        os.environ.pop(name, None)
    with stack(folder / "servers", settings=load_settings(home=home)) as own:
        made = Quay(own, home)
        made.release("promoted", code=0)
        made.release("refused", "--drill", "slice-regression", code=3)
        yield made


@dataclass
class Window:
    """A page, and which hosts it asked."""

    page: Page
    hosts: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)  # answers that were an error

    @classmethod
    def open(cls, context: BrowserContext, address: str) -> "Window":
        """Open an address."""
        own = cls(context.new_page())
        own.page.set_default_timeout(LOAD_MS)
        own.page.on("request", lambda request: own.hosts.add(request.url.split("/")[2]) if request.url.startswith("http") else None)
        own.page.on("response", own._seen)
        own.page.goto(address)
        return own

    def _seen(self, answer: Response) -> None:
        if answer.status >= 400:
            self.broken.append(f"{answer.status} {answer.url}")

    def pictures(self) -> dict[str, int]:
        """Source -> width of every plot on the page, 0 = not loaded."""
        self.page.wait_for_function("[...document.images].some(i => i.clientWidth > 300) && [...document.images].every(i => i.complete)")
        widths = self.page.evaluate("[...document.images].map(i => [i.src.slice(0, 200), i.naturalWidth, i.clientWidth])")
        return {source: natural for source, natural, shown in widths if shown > 300}

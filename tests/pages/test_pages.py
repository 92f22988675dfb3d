"""What people see of a promoted and of a refused release: MLflow's version page and Prefect's flow-run page, in Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_pages import CHROMIUM, PASSWORD, SECRETS, Quay, Window, quay
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: install the system's Chromium to look at the pages"),
]
NAMES = pytest.mark.parametrize("name", ["promoted", "refused"])
VERDICTS = {"promoted": "Promoted: six of six gates pass.", "refused": "Refused in drill slice-regression: "}
STATES = {"promoted": "Promoted", "refused": "Fell back"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quay]:
    with quay(tmp_path_factory.mktemp("a quay")) as own:
        yield own


@pytest.fixture(scope="module")
def browser(made: Quay) -> Iterator[Browser]:  # after the servers: Playwright's loop runs in this thread
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1400, "height": 3200})
    yield made
    made.close()


@NAMES
def test_the_version_page_says_why(made: Quay, context: BrowserContext, tmp_path: Path, name: str) -> None:
    """MLflow: the verdict in a sentence, what serves, every gate's word, plots that loaded, tags; nothing from other hosts."""
    told = made.releases[name].document
    window = Window.open(context, made.version_page(name))
    expect(window.page.get_by_text(VERDICTS[name]).first).to_be_visible()
    window.page.get_by_role("link", name="report").wait_for()
    pictures, text = window.pictures(), window.page.inner_text("body")
    window.page.screenshot(path=tmp_path / f"mlflow-{name}.png")

    assert all(f"{gate['name']} {'passed' if gate['outcome'] == 'pass' else 'failed'}" in text for gate in told["gates"])
    assert len(pictures) >= 3
    assert all(pictures.values()), pictures
    assert ("champion" in text) == (name == "promoted")
    assert window.hosts == {made.own.mlflow_url.removeprefix("http://")}


@NAMES
def test_the_link_to_the_report_opens_it(made: Quay, context: BrowserContext, tmp_path: Path, name: str) -> None:
    """The report opens among the run's artifacts, whole, its pictures inside."""
    window = Window.open(context, made.version_page(name))
    with context.expect_page() as opened:
        window.page.get_by_role("link", name="report").click()
    report = opened.value
    frame = report.frame_locator("iframe").first
    expect(frame.get_by_text(made.releases[name].document["release_id"]).first).to_be_visible(timeout=60_000)
    widths = frame.locator("img").evaluate_all("all => all.map(i => i.naturalWidth)")
    report.screenshot(path=tmp_path / f"report-{name}.png")

    assert len(widths) >= 5
    assert all(widths)


@NAMES
def test_the_flow_runs_page_says_what_became_of_it(made: Quay, context: BrowserContext, tmp_path: Path, name: str) -> None:
    """Prefect: the state by its own name, the log, every gate's artifacts with the reason; nothing from other hosts."""
    told = made.releases[name].document
    window = Window.open(context, made.run_page(name))
    expect(window.page.get_by_text(STATES[name], exact=True).first).to_be_visible()
    expect(window.page.get_by_text("data_contract: PASS in").first).to_be_attached(timeout=60_000)
    window.page.get_by_text("Artifacts", exact=True).first.click()
    for gate in told["gates"]:
        expect(window.page.get_by_text(gate["name"].replace("_", "-"), exact=True).first).to_be_visible(timeout=30_000)
    text = window.page.inner_text("body")
    window.page.screenshot(path=tmp_path / f"prefect-{name}.png")

    assert VERDICTS[name][:8] in text
    assert "Can't connect" not in text
    assert "Prefect Cloud" not in text
    assert window.hosts == {made.own.prefect_url.removeprefix("http://")}


@NAMES
def test_the_release_artifact_says_why(made: Quay, context: BrowserContext, tmp_path: Path, name: str) -> None:
    """The summary on Prefect's side: the same sentence as in MLflow, what to do next, and the way to the version's page."""
    window = Window.open(context, made.artifact(name, "release"))
    expect(window.page.get_by_text("Do next:").first).to_be_visible()
    window.page.screenshot(path=tmp_path / f"artifact-{name}.png")
    link = window.page.get_by_role("link", name="in the registry")

    assert VERDICTS[name] in window.page.inner_text("body")
    assert link.get_attribute("href") == made.version_page(name)


@NAMES
@pytest.mark.parametrize("gate", ["scaling", "slice-quality"])
def test_a_gates_artifact_shows_its_plot(made: Quay, context: BrowserContext, tmp_path: Path, name: str, gate: str) -> None:
    """The picture is inside of the artifact and was loaded."""
    window = Window.open(context, made.artifact(name, gate))
    pictures = window.pictures()
    window.page.screenshot(path=tmp_path / f"{gate}-{name}.png")

    assert pictures
    assert all(pictures.values())


@NAMES
def test_the_run_is_green_only_when_promoted(made: Quay, context: BrowserContext, name: str) -> None:
    """The details of a refused run name the gates that did not pass."""
    window = Window.open(context, made.run_page(name))
    window.page.get_by_text("Details", exact=True).first.click()
    stopped = [gate["name"] for gate in made.releases[name].document["gates"] if gate["outcome"] != "pass"]
    words = f"{', '.join(stopped)} did not pass" if stopped else "6 of 6 required gates pass"

    expect(window.page.get_by_text(words).first).to_be_visible()


def test_both_releases_left_no_secret_anywhere(made: Quay) -> None:
    """MLflow's and Prefect's databases, artifacts, evidence, reports, checkpoints, logs of the servers, output of the commands."""
    planted = [*SECRETS.values(), "planted-webhook-token", PASSWORD]
    key = made.home / "keys" / "development.pem"
    line = next(line for line in key.read_text().splitlines() if len(line) > 40 and "-" not in line and "Sea Trial" not in line)
    files = [path for path in made.home.parent.rglob("*") if path.is_file() and path != key]
    found = [(path.name, secret) for path in files for secret in [*planted, line] if secret.encode() in path.read_bytes()]
    shown = [secret for told in made.releases.values() for secret in [*planted, line] if secret in told.said]

    assert (found, shown) == ([], [])
    assert len(files) > 100

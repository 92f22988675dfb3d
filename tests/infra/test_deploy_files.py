"""The files for production: valid by their own schemas, loopback only, authentication on, and no secret in any of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from infra.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "infra" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
# of github.com/compose-spec/compose-spec, schema/compose-spec.json at 170098ba07d9 (Apache-2.0)
SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "compose-spec.json").read_text())
KUBERNETES = "1.33"
MANIFESTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}-{document['metadata'].get('name', 'template')}")
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
PODS = [case for case in MANIFESTS if "template" in case.values[0].get("spec", {})]  # type: ignore[operator, union-attr]


def variables(service: dict[str, Any]) -> dict[str, str]:
    """What a service's environment sets by itself."""
    return dict(service.get("environment", {}))


def pod(document: dict[str, Any]) -> dict[str, Any]:
    """The pod of a Deployment or Job."""
    found: dict[str, Any] = document["spec"]["template"]["spec"]
    return found


def texts() -> Iterator[tuple[Path, str]]:
    """Every file of infra/deploy."""
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file():
            yield path, path.read_text()


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_compose_file_is_valid(name: str) -> None:
    """By the schema that Docker publishes."""
    jsonschema.Draft7Validator(SCHEMA).validate(yaml.safe_load((DEPLOY / name).read_text()))


def test_the_schema_finds_a_mistake() -> None:
    """A schema that lets anything pass would prove nothing."""
    wrong = {**COMPOSE, "services": {**SERVICES, "mlflow": {**SERVICES["mlflow"], "port": ["5000"]}}}

    with pytest.raises(jsonschema.ValidationError, match="'port' does not match any"):
        jsonschema.Draft7Validator(SCHEMA).validate(wrong)


def test_compose_publishes_on_loopback_only() -> None:
    """No other machine reaches a port before somebody puts a proxy in front."""
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]

    assert published == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]


def test_compose_names_only_what_it_has() -> None:
    """Volumes, networks, secrets, services waited for and files of variables: each exists, or its example does."""
    volumes = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    files = {Path(item["path"]) for service in SERVICES.values() for item in service.get("env_file", [])}
    files |= {Path(secret["file"]) for secret in COMPOSE["secrets"].values()}

    assert {name for name in volumes if not name.startswith("./")} == set(COMPOSE["volumes"])
    assert all((DEPLOY / name).is_file() for name in volumes if name.startswith("./"))
    assert {name for service in SERVICES.values() for name in service["networks"]} == set(COMPOSE["networks"])
    assert {name for service in SERVICES.values() for name in service.get("secrets", [])} == set(COMPOSE["secrets"])
    assert {name for service in SERVICES.values() for name in service.get("depends_on", {})} <= set(SERVICES)
    assert {path.name for path in files} - {"signing-key.pem"} == {path.name for path in (DEPLOY / "secrets.example").iterdir()}


def test_compose_waits_for_health_of_services_that_tell_it() -> None:
    """`service_healthy` of a service without a health check never comes true."""
    waited = {name: how["condition"] for service in SERVICES.values() for name, how in service.get("depends_on", {}).items()}

    assert {name for name, condition in waited.items() if condition == "service_healthy"} == {
        name for name, service in SERVICES.items() if "healthcheck" in service
    } - {"worker"}
    assert all("healthcheck" not in SERVICES[name] for name, condition in waited.items() if condition != "service_healthy")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_restrained(name: str) -> None:
    """No new privileges, no capabilities beyond what an entry point needs, bounded logs, an image by version."""
    service = SERVICES[name]

    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    assert service["logging"]["options"]["max-size"] == "20m"
    assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", service["image"])


def test_servers_ask_who_comes_in() -> None:
    """MLflow runs its own basic authentication; Prefect's is a variable of its file of secrets, and clients send it."""
    example = {path.name: path.read_text() for path in (DEPLOY / "secrets.example").iterdir()}

    assert "--app-name=basic-auth" in SERVICES["mlflow"]["command"]
    assert "PREFECT_SERVER_API_AUTH_STRING=" in example["prefect-server.env"]
    assert {"PREFECT_API_AUTH_STRING=", "MLFLOW_TRACKING_PASSWORD="} <= set(example["client.env"].splitlines())


def test_no_file_holds_a_secret() -> None:
    """Examples have names without values; compose and manifests name secrets, and set none."""
    secret = re.compile(
        r"(PASSWORD|SECRET|AUTH_STRING|SEAL_KEY|ACCESS_KEY(_ID)?|CONNECTION_URL|STORE_URI|WEBHOOK|ROOT_USER)$", re.IGNORECASE
    )
    given = [(path.name, line) for path, text in texts() if "secrets.example" in path.parts for line in text.splitlines() if "=" in line]
    full = [
        (name, line)
        for name, line in given
        if not line.startswith("#") and secret.search(line.split("=")[0].strip()) and line.split("=")[1]
    ]
    set_here = [name for service in SERVICES.values() for name in variables(service) if secret.search(name)]

    assert (full, set_here) == ([], [])
    assert not [path for path, text in texts() if re.search(r"://[^/\s:@]+:(?!PASSWORD|\.\.\.)[^/\s@]+@", text)]


def test_copies_of_the_secrets_stay_out_of_git() -> None:
    """The folder that people copy is ignored."""
    assert "secrets/" in (DEPLOY / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("place", ["compose", "kubernetes"])
def test_variables_of_the_worker_are_settings(place: str) -> None:
    """A SEATRIAL_ variable that no setting reads would be a promise that nobody keeps."""
    manifests = {case.values[0]["metadata"].get("name"): case.values[0] for case in MANIFESTS if case.values[0]["kind"] == "ConfigMap"}  # type: ignore[index]
    given = variables(SERVICES["worker"]) if place == "compose" else manifests["sea-trial-client"]["data"]
    names = {name.removeprefix("SEATRIAL_").lower() for name in given if name.startswith("SEATRIAL_")}

    assert names >= {"store", "mlflow_tracking_uri", "allow_development_key", "recipes_allowed"}
    assert names <= set(Settings.model_fields)


@pytest.mark.parametrize("place", ["compose", "kubernetes"])
def test_telemetry_is_off(place: str) -> None:
    """Every process that runs Sea Trial's image."""
    wanted = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    if place == "compose":
        given = [variables(service) for service in SERVICES.values() if service["image"] == "sea-trial:local"]
    else:
        given = [
            case.values[0]["data"]
            for case in MANIFESTS
            if case.values[0]["metadata"].get("name") == "sea-trial" and "data" in case.values[0]
        ]  # type: ignore[index, operator]

    assert given
    assert all(wanted.items() <= found.items() for found in given)


@pytest.mark.parametrize("document", MANIFESTS)
def test_a_manifest_is_valid(document: dict[str, Any]) -> None:
    """By Kubernetes' own schema, without fields that it does not know."""
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_validator_finds_a_mistake() -> None:
    """Strict: a field with a wrong name is refused."""
    document = json.loads(json.dumps(PODS[0].values[0]))
    pod(document)["restartPolice"] = "Never"

    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("document", PODS)
def test_every_pod_is_restricted(document: dict[str, Any]) -> None:
    """What the namespace's pod security standard `restricted` asks for, and no token of Kubernetes."""
    own, [container] = pod(document), pod(document)["containers"]

    assert (own["automountServiceAccountToken"], own["enableServiceLinks"]) == (False, False)
    assert (own["securityContext"]["runAsNonRoot"], own["securityContext"]["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "limits" in container["resources"]


@pytest.mark.parametrize("document", PODS)
def test_secrets_are_references(document: dict[str, Any]) -> None:
    """Variables that a manifest sets itself are no secrets; those come from Secrets, which are in no file here."""
    [container] = pod(document)["containers"]
    names = [item["name"] for item in container.get("env", [])]

    assert not [name for name in names if re.search("PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY|SEAL", name)]
    assert any("secretRef" in source for source in container["envFrom"])


def test_nothing_is_reached_by_default() -> None:
    """One policy forbids all; no Service has an address outside of the cluster."""
    documents: list[Any] = [case.values[0] for case in MANIFESTS]
    policies = {item["metadata"]["name"]: item["spec"] for item in documents if item["kind"] == "NetworkPolicy"}

    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert {item["spec"]["type"] for item in documents if item["kind"] == "Service"} == {"ClusterIP"}
    assert not [item for item in documents if item["kind"] == "Secret"]


def test_gpus_are_held_by_one_worker_at_a_time() -> None:
    """A worker and a rank group ask for whole GPUs, and the worker is never doubled, not even while it is replaced."""
    documents: dict[str, Any] = {case.values[0]["metadata"].get("name", "rank-group"): case.values[0] for case in PODS}  # type: ignore[index, union-attr]

    assert documents["worker"]["spec"]["replicas"] == 1
    assert documents["worker"]["spec"]["strategy"] == {"type": "Recreate"}
    for name in ("worker", "rank-group"):
        resources = pod(documents[name])["containers"][0]["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"


def test_a_rank_group_runs_a_command_that_exists() -> None:
    """The template's command is understood by the command line."""
    from flows.cli import _parser

    [document] = [case.values[0] for case in PODS if "generateName" in case.values[0]["metadata"]]  # type: ignore[index, operator]
    words = pod(document)["containers"][0]["command"]  # type: ignore[arg-type]

    assert _parser().parse_args(words[1:]).recipe == "RECIPE"


def test_the_image_is_built_from_the_lock() -> None:
    """Pinned packages, a user without rights, nothing that tells of itself."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+?) \S+$", text, re.MULTILINE)

    assert "pip install -r requirements.lock" in text
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())

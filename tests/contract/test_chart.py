"""The Helm chart gives the objects of deploy/kubernetes, and others where values say so.

Helm's own library renders it (`hatch run chart:test`). The ordinary test run checks the files that are no templates.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.test_deploy_commands import APPS
from tests.deploy_files import DEPLOY, PARTS, container, manifests
from tests.monitoring_files import parsed

CHART = DEPLOY / "helm"
GPUS = {"scheduler": {"gpus": 2, "modelsVolume": {"persistentVolumeClaim": {"claimName": "models"}}}}
EVERYTHING = {
    **GPUS,
    "image": {"registry": "registry.example.com/team/", "tag": "7"},
    "frontend": {"args": ["--max-waiting=9"], "env": [{"name": "A", "value": "b"}], "affinity": {"nodeAffinity": {}}},
    "detokenizer": {"podAnnotations": {"a": "b"}, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
    "autoscaling": {"type": "hpa"},
    "imagePullSecrets": [{"name": "registry"}],
}
CUSTOM: Mapping[str, dict[str, Any]] = {
    "keda": {"autoscaling": {"type": "keda"}},
    "monitor": {"podMonitor": {"enabled": True}},
}
"""Values that add objects of other software, whose schemas Kubernetes does not have."""


def run(tool: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [Path(sys.executable).with_name(tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def chart() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return content


def values() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return content


def render(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that Helm makes of values."""
    helm = pytest.importorskip("helm_python", reason="hatch run chart:test has Helm's library")
    with helm.Chart.load(str(CHART)) as loaded:
        texts = loaded.render(dict(given), name="tercet", namespace="prod")
    documents = (yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml"))
    return [each for document in documents for each in document if each]


def test_defaults_follow_the_schema() -> None:
    done = run("check-jsonschema", "--schemafile", CHART / "values.schema.json", CHART / "values.yaml")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        {"frontend": {"replica": 1}},
        {"scheduler": {"gpus": -1}},
        {"autoscaling": {"type": "vpa"}},
        {"autoscaling": {"minReplicas": 1}},
        {"image": {"registry": "example.com"}},
        {"detokenizer": {"args": ["max-states=9"]}},
    ],
)
def test_the_schema_refuses_values_that_mean_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(wrong))
    done = run("check-jsonschema", "--schemafile", CHART / "values.schema.json", tmp_path / "values.json")
    assert done.returncode == 1, done.stdout


def test_every_default_is_in_the_schema_and_the_other_way_round() -> None:
    def names(schema: Mapping[str, Any]) -> Any:
        return {name: names(each) for name, each in schema["properties"].items()} if "properties" in schema else None

    def compare(given: Any, known: Any) -> None:
        if known is not None:
            assert set(given) == set(known)
            for name in given:
                compare(given[name], known[name])

    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]
    compare(values(), names(schema))


def test_values_are_those_of_the_manifests() -> None:
    (autoscaler,) = manifests("HorizontalPodAutoscaler").values()
    given = values()
    assert given["autoscaling"]["minReplicas"] == autoscaler["spec"]["minReplicas"] == given["scheduler"]["replicas"]
    assert given["autoscaling"]["maxReplicas"] == autoscaler["spec"]["maxReplicas"]
    for part in PARTS:
        assert container(part)["image"] == f"tercet-{part}:{chart()['appVersion']}"
        assert given[part]["resources"] == container(part)["resources"]
    readme = (DEPLOY / "README.md").read_text()
    assert all(f"create secret generic {secret}" in readme for secret in given["secrets"].values())


def test_every_value_is_used_by_a_template() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\w+", text))
    for table, content in values().items():
        assert table in used | {"frontend", "detokenizer"}
        for name in content if isinstance(content, dict) else ():
            assert name in used or name.removesuffix("Keys") in PARTS, f"{table}.{name}"


def plain(thing: Any) -> Any:
    """Return a part of an object without what the chart names otherwise: labels, images, names and order of words."""
    if isinstance(thing, dict):
        if thing and all(name.startswith("app.kubernetes.io/") for name in thing):
            own = thing.get("app.kubernetes.io/component", thing.get("app.kubernetes.io/name", "tercet"))
            return "all pods" if own == "tercet" else f"pods of {own}"
        kept = {name: each for name, each in thing.items() if name not in {"image", "imagePullPolicy"}}
        return {name: plain(each) for name, each in kept.items()}
    if isinstance(thing, list):
        return sorted(map(plain, thing), key=repr)
    return re.sub(r"\btercet-(?=(scheduler|detokenizer):)", "", thing) if isinstance(thing, str) else thing


def by_name(objects: list[dict[str, Any]], prefix: str = "") -> dict[tuple[str, str], Any]:
    return {
        (each["kind"], each["metadata"]["name"].removeprefix(prefix)): plain(each["spec"])
        for each in objects
        if each["kind"] not in {"Namespace", "HorizontalPodAutoscaler"}
    }


def deployment(given: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the Deployment of a part."""
    (found,) = [
        each
        for each in render(given)
        if each["kind"] == "Deployment" and each["metadata"]["name"].removeprefix("tercet-") == part
    ]
    return found


@pytest.mark.slow
def test_defaults_give_the_objects_of_the_manifests() -> None:
    kinds = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
    expected = by_name([each for kind in kinds for each in manifests(kind).values()])
    expected["Deployment", "scheduler"]["replicas"] = 2  # set by the autoscaler there
    found = by_name(render({}), "tercet-")
    found["Service", "frontend"].pop("type")
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, GPUS, EVERYTHING], ids=["defaults", "gpus", "everything"])
def test_objects_follow_the_schemas_of_kubernetes(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(render(given)))
    done = run("kubernetes-validate", "--strict", tmp_path / "objects.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, GPUS, EVERYTHING], ids=["defaults", "gpus", "everything"])
def test_commands_are_ones_that_the_parts_take(given: dict[str, Any]) -> None:
    deployments = [each for each in render(given) if each["kind"] == "Deployment"]
    assert len(deployments) == len(PARTS)
    for each in deployments:
        (part,) = each["spec"]["template"]["spec"]["containers"]
        words = [word.replace("$(POD_NAME)", "scheduler-6c8f7d9b5-x2kqz") for word in part["args"]]
        APPS[f"tercet-{part['name']}"].parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.slow
def test_values_reach_the_objects() -> None:
    deployments = {part: deployment(EVERYTHING, part) for part in PARTS}
    pods = {part: each["spec"]["template"]["spec"] for part, each in deployments.items()}
    scheduler, frontend = (pods[part]["containers"][0] for part in ("scheduler", "frontend"))
    assert "replicas" not in deployments["scheduler"]["spec"], "the autoscaler sets it"
    assert scheduler["image"] == "registry.example.com/team/tercet-scheduler:7"
    assert scheduler["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    assert "--tensor-parallel-size=2" in scheduler["args"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in pods["scheduler"]["volumes"]
    assert {"name": "A", "value": "b"} in frontend["env"]
    assert "--max-waiting=9" in frontend["args"]
    assert pods["detokenizer"]["nodeSelector"] == {"a": "b"}
    assert deployments["detokenizer"]["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    (on_gpus,) = deployment(GPUS, "scheduler")["spec"]["template"]["spec"]["containers"]
    assert on_gpus["image"] == f"tercet-scheduler:{chart()['appVersion']}-cuda"


@pytest.mark.slow
def test_schedulers_scale_by_the_time_in_queues() -> None:
    (hpa,) = [each for each in render(EVERYTHING) if each["kind"] == "HorizontalPodAutoscaler"]
    (keda,) = [each for each in render(CUSTOM["keda"]) if each["kind"] == "ScaledObject"]
    assert hpa["spec"]["scaleTargetRef"]["name"] == keda["spec"]["scaleTargetRef"]["name"] == "tercet-scheduler"
    assert f"as: {hpa['spec']['metrics'][0]['external']['metric']['name']}" in (DEPLOY / "README.md").read_text()
    (trigger,) = keda["spec"]["triggers"]
    assert parsed(trigger["metadata"]["query"])
    scraped = 'tercet_queue_seconds_bucket{namespace="prod", pod=~"tercet-frontend-.+"}'
    assert scraped in " ".join(trigger["metadata"]["query"].split()), "another release in the namespace counts"
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


@pytest.mark.slow
def test_prometheus_scrapes_every_frontend_with_a_key() -> None:
    (monitor,) = [each for each in render(CUSTOM["monitor"]) if each["kind"] == "PodMonitor"]
    frontend = deployment({}, "frontend")
    assert monitor["spec"]["selector"]["matchLabels"] == frontend["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port["name"] for port in frontend["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert endpoint["port"] in ports
    assert endpoint["authorization"]["credentials"] == {"name": "tercet-metrics-key", "key": "key"}


@pytest.mark.slow
def test_policies_can_be_left_out() -> None:
    assert not [each for each in render({"networkPolicy": {"enabled": False}}) if each["kind"] == "NetworkPolicy"]


@pytest.mark.slow
def test_helm_refuses_values_that_mean_nothing() -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match="replica"):
        render({"frontend": {"replica": 1}})

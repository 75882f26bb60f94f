"""The deployment files are valid, hardened, and agree with one another and with the parts they start."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tercet.detokenizer.config import DetokenizerConfig
from tercet.frontend.config.config import HttpConfig
from tercet.scheduler.config import ProcessOptions
from tests.deploy_files import (
    DEPLOY,
    INBOX_PORTS,
    MONITORING,
    PARTS,
    ROOT,
    Dockerfile,
    compose,
    container,
    declared_closure,
    host_pods,
    kubernetes_files,
    kustomization,
    manifests,
    option,
    part_of,
    pod,
)

SERVICES = {name: service for name, service in compose()["services"].items() if name not in {"keys", *MONITORING}}
EVERYBODY = {(sender, receiver) for sender in PARTS for receiver in PARTS if sender != receiver}


def check(tool: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(tool), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_yaml_is_tidy() -> None:
    check("yamllint", "--strict", "--config-file", DEPLOY / ".yamllint.yaml", DEPLOY)


@pytest.mark.parametrize("file", ["compose.yaml", "compose-hosts.yaml"])
def test_compose_follows_its_specification(file: str) -> None:
    check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / file)


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    check("kubernetes-validate", "--strict", *kubernetes_files())


@pytest.mark.parametrize("part", PARTS)
def test_dockerfiles_follow_good_practice(part: str) -> None:
    check("hadolint", Dockerfile(part).path)


@pytest.mark.parametrize("part", PARTS)
def test_an_image_holds_what_its_part_declares_and_no_more(part: str) -> None:
    dockerfile = Dockerfile(part)
    assert dockerfile.copies() == declared_closure(part)
    assert dockerfile.installs()
    assert all(packages == declared_closure(part) for packages in dockerfile.installs())


@pytest.mark.parametrize("part", PARTS)
def test_what_a_package_compiles_its_image_has_a_compiler_for(part: str) -> None:
    compiles = any((ROOT / "packages" / package / "csrc").is_dir() for package in declared_closure(part))
    runs = Dockerfile(part).values("RUN")
    first = next(number for number, run in enumerate(runs) if "pip install" in run)
    assert any(re.search(r"apt-get install .*\bg\+\+", run) for run in runs[:first]) is compiles


@pytest.mark.parametrize("part", PARTS)
def test_an_image_runs_as_nobody_in_particular_and_can_be_told_to_stop(part: str) -> None:
    dockerfile = Dockerfile(part)
    assert dockerfile.final["USER"] == "10001:10001"
    assert dockerfile.final["STOPSIGNAL"] == "SIGTERM"
    assert "constraints.txt" in dockerfile.values("COPY")[0]
    bases = [base for base in dockerfile.values("FROM") if base.startswith("python")]
    assert set(bases) == {base for base in bases if re.match(r"python:3\.12-slim-bookworm\b", base)}


@pytest.mark.parametrize("part", PARTS)
def test_ports_are_the_same_everywhere(part: str) -> None:
    listen = f"tcp://0.0.0.0:{INBOX_PORTS[part]}"
    dockerfile = Dockerfile(part)
    assert option(dockerfile.command(), "--listen") == listen
    assert str(INBOX_PORTS[part]) in dockerfile.final["EXPOSE"].split()
    assert option(container(part)["args"], "--listen") == listen
    assert {"name": "inbox", "containerPort": INBOX_PORTS[part]} in container(part)["ports"]
    for name, service in SERVICES.items():
        if part_of(name) == part:
            assert option(service["command"], "--listen") == listen


@pytest.mark.parametrize("peer", ["scheduler", "detokenizer"])
def test_the_frontend_looks_for_its_peers_where_they_are(peer: str) -> None:
    spec = f"tcp://{peer}:{INBOX_PORTS[peer]}"
    assert option(Dockerfile("frontend").command(), f"--{peer}") == spec
    assert option(SERVICES["frontend"]["command"], f"--{peer}") == spec
    assert option(container("frontend")["args"], f"--{peer}") == spec
    service = manifests("Service")[peer]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"], "a part that loads would not be found, and a detokenizer never ready"
    assert [port["port"] for port in service["ports"]] == [INBOX_PORTS[peer]]


def test_compose_hands_keys_on_only_where_the_shell_sets_them() -> None:
    """A default for a missing key would be an empty key option, which is refused."""
    assert {"TERCET_API_KEYS", "TERCET_ADMIN_KEYS"} <= set(SERVICES["frontend"]["environment"])


def test_schedulers_on_gpus_answer_to_the_same_name() -> None:
    assert SERVICES["scheduler-gpu"]["networks"]["parts"]["aliases"] == ["scheduler"]
    assert SERVICES["scheduler"]["profiles"] == ["cpu"]
    assert "COMPOSE_PROFILES=cpu" in (DEPLOY / ".env").read_text().splitlines()


@pytest.mark.parametrize("part", PARTS)
def test_images_have_one_name_and_the_version_of_their_part(part: str) -> None:
    about = (ROOT / "packages" / part / "src/tercet" / part / "__about__.py").read_text()
    version = about.partition('__version__ = "')[2].partition('"')[0]
    image = f"tercet-{part}:{version}"
    assert SERVICES[part]["image"] == image
    assert container(part)["image"] == image
    assert {"name": f"tercet-{part}", "newTag": version} in kustomization("kubernetes")["images"]
    assert image in Dockerfile(part).path.read_text()


def test_the_kustomization_names_every_file() -> None:
    assert set(kustomization("kubernetes")["resources"]) == {path.name for path in kubernetes_files()}
    assert kustomization("kubernetes")["namespace"] in manifests("Namespace")
    assert kustomization("kubernetes-gpu")["resources"] == ["../kubernetes"]


@pytest.mark.parametrize("name", [*SERVICES, "keys", *MONITORING])
def test_containers_of_compose_can_do_little(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    published = [port.rpartition(":")[0].rpartition(":")[0] for port in service.get("ports", ())]
    assert published == (["127.0.0.1"] if name in {"frontend", "grafana"} else [])


@pytest.mark.parametrize("name", MONITORING)
def test_monitoring_starts_when_it_is_asked_for_and_sees_no_key_of_a_part(name: str) -> None:
    service = compose()["services"][name]
    assert service["profiles"] == ["monitoring"]
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "a tag that stays"
    assert service["networks"] == ["clients"]
    binds = [volume for volume in service["volumes"] if volume["type"] == "bind"]
    assert all((DEPLOY / volume["source"]).is_file() and volume["read_only"] for volume in binds)
    [kept] = [volume for volume in service["volumes"] if volume["type"] == "volume"]
    assert kept["source"] == name
    assert name in compose()["volumes"]


def test_prometheus_of_compose_reads_every_frontend_by_the_same_rules() -> None:
    alone, together = (
        yaml.safe_load((DEPLOY / "monitoring" / file).read_text())
        for file in ("prometheus.yaml", "prometheus-compose.yaml")
    )
    assert alone["rule_files"] == together["rule_files"] == ["alerts.yaml"]
    (read,) = together["scrape_configs"]
    assert read["job_name"] == alone["scrape_configs"][0]["job_name"]
    assert read["dns_sd_configs"][0]["names"] == ["frontend"]
    port = option(SERVICES["frontend"]["command"], "--port")
    assert str(read["dns_sd_configs"][0]["port"]) == port
    _, _, script = compose()["services"]["prometheus"]["entrypoint"]
    assert f"> {read['authorization']['credentials_file']};" in script
    mounts = {volume["target"]: volume["source"] for volume in compose()["services"]["prometheus"]["volumes"]}
    config = option(script.split(), "--config.file")
    assert mounts[config] == "./monitoring/prometheus-compose.yaml"
    assert mounts[f"{config.rpartition('/')[0]}/alerts.yaml"] == "./monitoring/alerts.yaml"
    assert mounts[option(script.split(), "--storage.tsdb.path")] == "prometheus"


def test_grafana_of_compose_finds_prometheus_and_the_dashboard() -> None:
    folder = DEPLOY / "monitoring" / "grafana"
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    grafana = compose()["services"]["grafana"]
    mounts = {volume["target"]: volume["source"] for volume in grafana["volumes"]}
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts[home] == "./monitoring/dashboard.json"
    assert home.rpartition("/")[0] == provider["options"]["path"]


@pytest.mark.parametrize("part", PARTS)
def test_pods_can_do_little(part: str) -> None:
    assert pod(part)["securityContext"]["runAsNonRoot"] is True
    assert pod(part)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(part)["automountServiceAccountToken"] is False
    assert container(part)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # Kubernetes runs every image as the same user.
    assert f"{pod(part)['securityContext']['runAsUser']}:10001" == Dockerfile(part).final["USER"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_part_sees_no_key_but_its_own(name: str) -> None:
    (keys,) = [volume for volume in SERVICES[name]["volumes"] if volume["source"] == "keys"]
    assert keys["volume"] == {"subpath": part_of(name)}
    assert keys["read_only"] is True
    assert option(SERVICES[name]["command"], "--keys") == keys["target"]
    assert SERVICES[name]["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_frontends_of_compose_keep_responses_where_they_may_write() -> None:
    frontend = SERVICES["frontend"]
    (state,) = [volume for volume in frontend["volumes"] if volume["source"] == "state"]
    folder, _, file = option(frontend["command"], "--response-store").rpartition("/")
    assert (folder, file.endswith(".sqlite")) == (state["target"], True)
    assert not state.get("read_only")
    assert "state" in compose()["volumes"]
    # A new volume belongs to the owner of the image's folder.
    made = next(run for run in Dockerfile("frontend").values("RUN") if "install --directory" in run)
    assert re.search(rf"--owner=10001 .*{state['target']}\b", made)


def test_compiled_kernels_are_kept_where_they_can_be_run() -> None:
    """Docker's tmpfs is mounted noexec, and the root is read-only."""
    dockerfile = Dockerfile("scheduler")
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", " ".join(dockerfile.values("ENV")))
    made = next(run for run in dockerfile.values("RUN") if "install --directory" in run)
    assert re.search(rf"--owner=10001 .*{folder}\b", made)
    volumes = {volume["target"]: volume for volume in SERVICES["scheduler-gpu"]["volumes"]}
    kernels = volumes.pop(folder)
    assert kernels == {"type": "volume", "source": "kernels", "target": folder}
    assert kernels["source"] in compose()["volumes"]
    assert [*volumes.values()] == SERVICES["scheduler"]["volumes"]
    (patch,) = kustomization("kubernetes-gpu")["patches"]
    steps = {step["path"].rpartition("/spec/")[2]: step["value"] for step in yaml.safe_load(patch["patch"])}
    mount, volume = steps["containers/0/volumeMounts/-"], steps["volumes/-"]
    assert (mount["mountPath"], mount["name"]) == (folder, volume["name"])


def test_what_is_off_on_kubernetes_is_told_with_how_to_turn_it_on() -> None:
    """The patch of the README fits the file it patches; without the patch nothing is stored."""
    assert not [word for word in container("frontend")["args"] if word.startswith("--response-store")]
    text = (DEPLOY / "README.md").read_text()
    (shown,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("patches:")]
    (patch,) = yaml.safe_load(shown)["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": "frontend"}
    steps = {step["path"]: step for step in yaml.safe_load(patch["patch"])}
    start = "/spec/template/spec/"
    assert steps[f"{start}containers/0/args/-"]["value"] == option_of(SERVICES["frontend"]["command"])
    mount, volume = (steps[f"{start}{path}"]["value"] for path in ("containers/0/volumeMounts/-", "volumes/-"))
    assert mount["name"] == volume["name"] not in {each["name"] for each in pod("frontend")["volumes"]}
    assert steps[f"{start}topologySpreadConstraints"]["op"] == "remove"
    assert "topologySpreadConstraints" in pod("frontend")
    assert "affinity" not in pod("frontend")


def test_the_kustomization_to_write_fits_what_it_is_written_over() -> None:
    text = (DEPLOY / "README.md").read_text()
    (shown,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("resources:")]
    mine = yaml.safe_load(shown)
    assert mine["resources"] == ["../deploy/kubernetes"]
    images = {image["name"] for image in kustomization("kubernetes")["images"]}
    assert {image["name"] for image in mine["images"]} == images
    (patch,) = mine["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": "scheduler"}
    model, volume = yaml.safe_load(patch["patch"])
    number = int(model["path"].rpartition("/")[2])
    assert container("scheduler")["args"][number].startswith("--model=")
    assert model["value"].startswith("--model=")
    assert pod("scheduler")["volumes"][int(volume["path"].rpartition("/")[2])]["name"] == volume["value"]["name"]


def option_of(command: list[str]) -> str:
    (word,) = [each for each in command if each.startswith("--response-store")]
    return word


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_sees_no_key_but_its_own(part: str) -> None:
    secrets = {volume["secret"]["secretName"] for volume in pod(part)["volumes"] if "secret" in volume}
    assert secrets == {f"tercet-keys-{part}"} | ({"tercet-api-keys"} if part == "frontend" else set())
    assert all(f"create secret generic {secret}" in (DEPLOY / "README.md").read_text() for secret in secrets)
    (mount,) = [mount for mount in container(part)["volumeMounts"] if mount["name"] == "keys"]
    assert option(container(part)["args"], "--keys") == mount["mountPath"]


def test_links_are_open_to_those_that_use_them_and_to_nobody_else() -> None:
    allowed: set[tuple[str, str]] = set()
    policies = manifests("NetworkPolicy")
    for part in PARTS:
        for rule in policies[part]["spec"]["ingress"]:
            if rule["ports"] == [{"port": INBOX_PORTS[part]}]:
                allowed |= {
                    (peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"], part) for peer in rule["from"]
                }
            else:
                assert (part, rule) == ("frontend", {"ports": [{"port": 8000}]})
    assert allowed == EVERYBODY, "membership runs both ways on every link"
    assert policies["egress"]["spec"]["policyTypes"] == ["Egress"]


@pytest.mark.parametrize("part", PARTS)
def test_parts_get_the_time_they_take_to_finish(part: str) -> None:
    needed = {
        "frontend": HttpConfig().shutdown_grace,
        "scheduler": ProcessOptions().drain_grace,
        "detokenizer": DetokenizerConfig().drain_grace,
    }[part]
    before = container(part).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod(part)["terminationGracePeriodSeconds"] > before + needed
    assert float(SERVICES[part]["stop_grace_period"].removesuffix("s")) > needed


def test_every_part_scales_and_keeps_a_pod_through_disruptions() -> None:
    assert set(manifests("PodDisruptionBudget")) == set(manifests("Deployment")) == set(PARTS)
    autoscaler = manifests("HorizontalPodAutoscaler")["scheduler"]["spec"]
    assert autoscaler["minReplicas"] > 1, "a budget of one pod unavailable must leave another"
    assert "replicas" not in manifests("Deployment")["scheduler"]["spec"], "applying again would undo the autoscaler"
    assert autoscaler["metrics"][0]["external"]["metric"]["name"] == "tercet_queued"


def test_pods_of_several_hosts_follow_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """The schema of LeaderWorkerSet is not among those of Kubernetes; its templates are those of pods."""
    for name, template in host_pods().items():
        labels = template["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(deployment))
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes-hosts" / "scheduler.yaml").read_text()))
    assert [each["kind"] for each in objects] == ["LeaderWorkerSet", "NetworkPolicy"]
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(objects[1]))
    check("kubernetes-validate", "--strict", *sorted(tmp_path.glob("*.yaml")))


def test_hosts_of_a_model_differ_in_their_split_and_labels_alone() -> None:
    leader, worker = host_pods().values()
    one, other = (template["spec"]["containers"][0] for template in (leader, worker))
    split = ["--nnodes=2", "--tensor-parallel-size=8", "--pipeline-parallel-size=2"]
    assert one["args"] == [*other["args"], *split]
    assert {**one, "args": []} == {**other, "args": []}
    assert {**leader["spec"], "containers": []} == {**worker["spec"], "containers": []}
    alone = container("scheduler")
    assert one["image"] == alone["image"]
    assert one["securityContext"] == alone["securityContext"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[probe] == alone[probe]
    assert leader["metadata"]["labels"] == manifests("Service")["scheduler"]["spec"]["selector"]
    assert worker["metadata"]["labels"] != leader["metadata"]["labels"], "frontends connect to the leader alone"
    assert int(one["resources"]["limits"]["nvidia.com/gpu"]) * 2 == 8 * 2


def test_several_hosts_replace_the_deployment() -> None:
    found = kustomization("kubernetes-hosts")
    assert found["resources"] == ["../kubernetes", "scheduler.yaml"]
    targets = {(patch["target"]["kind"], patch["target"]["name"]) for patch in found["patches"]}
    assert targets == {("Deployment", "scheduler"), ("HorizontalPodAutoscaler", "scheduler")}
    assert all("$patch: delete" in patch["patch"] for patch in found["patches"])


def test_compose_for_two_hosts_is_as_hardened_and_listens_on_loopback() -> None:
    services = compose("compose-hosts.yaml")["services"]
    assert {name: service["profiles"] for name, service in services.items()} == {
        "frontend": ["server"],
        "detokenizer": ["server"],
        "scheduler": ["server"],
        "ranks": ["ranks"],
    }
    for name, service in services.items():
        part = part_of(name)
        assert service["image"].removesuffix("-cuda") == SERVICES[part]["image"]
        assert service["network_mode"] == "host"
        for option_name in ("read_only", "cap_drop", "security_opt", "tmpfs", "restart", "stop_grace_period"):
            assert service[option_name] == SERVICES[part][option_name]
        assert option(service["command"], "--listen") == f"tcp://127.0.0.1:{INBOX_PORTS[part]}"
        (keys,) = [volume for volume in service["volumes"] if volume["target"] == option(service["command"], "--keys")]
        assert keys["source"].endswith(f"/{part}")
        assert keys["read_only"] is True
    near, far = services["scheduler"], services["ranks"]
    split = ["--nnodes=2", "--tensor-parallel-size=8", "--pipeline-parallel-size=2"]
    assert near["command"] == [*far["command"][:3], "--node-rank=0", far["command"][4], *split]
    assert far["command"][3] == "--node-rank=1"

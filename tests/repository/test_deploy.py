"""The files of deploy/: what can be said of them without a cluster and without Docker."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import forked
import pytest
import yaml

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from hf_sparsekv_cli.app import app as command
from hf_sparsekv_serve.http import create_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MISSING = "Ray is not installed: `make test-ray` installs it"
RAY = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason=MISSING)


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods() -> dict[str, dict]:
    """Specifications of all pods."""
    (deployment,) = (one for one in documents("kubernetes.yaml") if one["kind"] == "Deployment")
    (service,) = documents("rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    found = {"deployment": deployment["spec"]["template"]["spec"], "head": cluster["headGroupSpec"]["template"]["spec"]}
    return found | {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}


def test_the_page_names_the_arguments_of_the_file():
    page = (ROOT / "docs" / "serving-scale.md").read_text()
    assert "(../deploy/serve.yaml)" in page
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", page, re.M))))
    (file,) = documents("serve.yaml")
    assert set(file["applications"][0]["args"]) <= told


def test_both_files_for_ray_deploy_the_same():
    (alone,), (service,) = documents("serve.yaml"), documents("rayservice.yaml")
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["applications"] == alone["applications"]


@RAY
def test_ray_takes_its_file():
    from ray.serve.schema import ServeDeploySchema

    from hf_sparsekv_serve.ray.deployment import Deployed

    (config,) = documents("serve.yaml")
    (application,) = ServeDeploySchema(**config).applications
    module, _, function = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    config, offload, serving = Deployed(**application.args).engine_arguments()
    assert config is not None and offload.max_host_bytes == 200_000_000_000 and serving.max_rows == 16


@RAY
def test_ray_takes_its_file_of_replicas_with_two_gpus():
    from ray.serve.schema import ServeDeploySchema

    from hf_sparsekv_serve.ray.deployment import build

    (config,) = documents("serve-tensor-parallel.yaml")
    (application,) = ServeDeploySchema(**config).applications
    assert build(application.args)._bound_deployment.ray_actor_options == {"num_gpus": 2, "num_cpus": 8}


@RAY
def test_ray_has_the_version_that_is_pinned():
    import ray

    (service,) = documents("rayservice.yaml")
    assert f"ray=={ray.__version__}\n" in (ROOT / "constraints.txt").read_text()
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.mark.parametrize("name", ["deployment", "head", "gpu-workers"])
def test_no_pod_runs_as_root(name):
    pod = pods()[name]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == context["runAsGroup"] == 10001
    for container in pod["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert "memory" in container["resources"]["limits"]
        for variable in container["env"]:
            assert "value" not in variable or "KEY" not in variable["name"], "a key in a file"


def test_probes_ask_what_the_server_answers():
    container = pods()["deployment"]["containers"][0]
    paths = {route.path for route in create_app(NoEngine(), "m").routes}
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert {probe["path"] for probe in probes.values()} <= paths
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}


class NoEngine:
    tokenizer, max_length, ready, failed, eos = None, 10, True, None, frozenset()

    def stats(self):
        raise AssertionError("nobody asks")


def test_the_pods_command_is_one():
    """With a model that is not there: the options are taken, and it is looked for."""
    from typer.testing import CliRunner

    container = pods()["deployment"]["containers"][0]
    assert container["command"][:2] == ["hf-sparsekv", "serve"]
    args = ["serve", "/not/there", *container["args"]]
    args[args.index("--port") + 1] = "0"
    args[args.index("--host") + 1] = "127.0.0.1"
    done = CliRunner().invoke(command, args)
    assert done.exit_code != 0 and "there is no directory '/not/there'" in done.output


def test_the_image_has_what_it_copies_and_no_root():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    packages = {path.parent.name for path in ROOT.glob("hf_sparsekv*/__init__.py")}
    assert packages <= set(kept), "a package is left out of the image"
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"} <= set(kept)
    (install,) = (line for line in lines if "pip install" in line)
    assert ".[gpu,ray]" in install


def test_the_table_of_gpus_is_what_the_command_says():
    page = (ROOT / "docs/serving-scale.md").read_text()
    (shown,) = re.findall(r"^    python (tools/gpus_for_users\.py .*?)\n\n(\| users .*?)(?:\n\n|\Z)", page, re.M | re.S)
    args = shown[0].replace("\\\n", " ").split()
    done = forked.run([str(ROOT / args[0]), *args[1:]], cwd=ROOT).stdout
    assert done.split("\n\n")[1].strip() == shown[1].strip()
    assert done.startswith("10 rows of 131,072 tokens")

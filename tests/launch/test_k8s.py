"""launch/k8s.yaml without a cluster: its fields against those of a TrainJob, and its own command in two processes."""

import copy
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.harness import runner
from tests.launch.test_launch import popen, shell, wait

MANIFEST, ACCOUNT, POLICY = yaml.safe_load_all((runner.ROOT / "launch" / "k8s.yaml").read_text())
SCHEMA = json.loads(Path(__file__).with_name("trainjob.schema.json").read_text())
TRAINER = MANIFEST["spec"]["trainer"]
JOB = MANIFEST["metadata"]["name"]
# What Trainer's torch plugin sets in each pod of two, and the rank that the Job gives.
PLUGIN = {
    "PET_NNODES": str(TRAINER["numNodes"]),
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": f"{JOB}-node-0-0.{JOB}",
    "PET_MASTER_PORT": "29500",
    "RUN_KEY": 64 * "a",  # of the secret
}


def pod_template() -> Any:
    """What the manifest changes in the pods of the runtime."""
    (patch,) = MANIFEST["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node", "the job of torch-distributed that trains"
    return job["template"]["spec"]["template"]["spec"]


def is_valid(manifest: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(manifest)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a document with each of its keys or indices."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


def mutants(change: Callable[[Any, Any], bool]) -> Iterator[tuple[str, Any]]:
    """Copies of the manifest with one change each, and where it is; `change` says whether it has made one."""
    for i in range(len([*places(MANIFEST)])):
        mutant = copy.deepcopy(MANIFEST)
        node, key = [*places(mutant)][i]
        where = f"{key} in {node}"
        if change(node, key):
            yield where, mutant


def misspell(node: Any, key: Any) -> bool:
    if isinstance(node, dict):
        node[f"{key}s"] = node.pop(key)
    return isinstance(node, dict)


def retype(node: Any, key: Any) -> bool:
    node[key] = {"a": 1} if not isinstance(node[key], dict) else "a"
    return True


def test_manifest() -> None:
    jsonschema.validate(MANIFEST, SCHEMA, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("change", [misspell, retype])
def test_mutants(change: Callable[[Any, Any], bool]) -> None:
    """Every key misspelt, every value of a wrong type."""
    found = {where: is_valid(mutant) for where, mutant in mutants(change)}
    assert len(found) > 30
    assert not [where for where, valid in found.items() if valid]


def test_no_runtime() -> None:
    mutant = copy.deepcopy(MANIFEST)
    del mutant["spec"]["runtimeRef"]
    assert not is_valid(mutant)


def test_quoted_number() -> None:
    """`--epochs 20` in YAML is a number, and Kubernetes wants strings."""
    mutant = copy.deepcopy(MANIFEST)
    mutant["spec"]["trainer"]["args"].append(20)
    assert not is_valid(mutant)


def test_volumes() -> None:
    """What fits no schema: runs on a claim, shared memory in memory, and time to save before the pod is killed."""
    pod = pod_template()
    (container,) = pod["containers"]
    assert container["name"] == "node"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert not volumes, "mounted nowhere"
    assert set(mounts) == {"/runs", "/dev/shm"}
    assert "persistentVolumeClaim" in mounts["/runs"]
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["terminationGracePeriodSeconds"] >= 120, "30 s if nobody says so"


def test_only_the_jobs_own_pods_may_connect() -> None:
    """In the policy's terms: to all pods of the job, nothing comes in but from all pods of the job."""
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": JOB}}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": JOB}, "spec": spec}
    assert policy == POLICY


def test_pods_get_the_key_from_a_secret() -> None:
    """Which the first comment's command creates: no key stands in the manifest."""
    variable = TRAINER["env"][0]
    assert variable == {"name": "RUN_KEY", "valueFrom": {"secretKeyRef": {"name": "brigade", "key": "key"}}}
    text = (runner.ROOT / "launch" / "k8s.yaml").read_text()
    assert 'kubectl create secret generic brigade --from-literal=key="$(openssl rand -hex 32)"' in text


def test_pods_have_no_token() -> None:
    """A patch of a runtime has no automountServiceAccountToken, so the pods have an account of their own without it."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": JOB}}
    assert account | {"automountServiceAccountToken": False} == ACCOUNT
    assert pod_template()["serviceAccountName"] == JOB


# --- the Pod Security Standard "restricted", rule by rule ---------------------------------------------------

# https://kubernetes.io/docs/concepts/security/pod-security-standards/, those of "baseline" first. Trainer's runtime
# torch-distributed adds a container's name and image.
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
    *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
SELINUX = (None, "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
Rule = Callable[[Any, list[Any]], bool]  # of the pod, and of all its containers


def of(node: Any, *keys: str) -> Any:
    """A value, None where something on the way to it is not there."""
    for key in keys:
        node = (node or {}).get(key)
    return node


def contexts(pod: Any, containers: list[Any]) -> list[Any]:
    return [one.get("securityContext") or {} for one in (pod, *containers)]


def handlers(containers: list[Any]) -> list[Any]:
    """All probes and hooks."""
    probes = [one.get(key) for one in containers for key in ("livenessProbe", "readinessProbe", "startupProbe")]
    return probes + [of(one, "lifecycle", key) for one in containers for key in ("postStart", "preStop")]


RESTRICTED: dict[str, Rule] = {
    "HostProcess": lambda pod, all_: not any(of(one, "windowsOptions", "hostProcess") for one in contexts(pod, all_)),
    "host namespaces": lambda pod, _: not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
    "privileged containers": lambda pod, all_: not any(one.get("privileged") for one in contexts(pod, all_)),
    "capabilities, baseline": lambda pod, all_: all(
        {*(of(one, "capabilities", "add") or [])} <= BASELINE_CAPABILITIES for one in contexts(pod, all_)
    ),
    "HostPath volumes": lambda pod, _: not any("hostPath" in one for one in pod.get("volumes", [])),
    "host ports": lambda _, all_: not any(port.get("hostPort") for one in all_ for port in one.get("ports", [])),
    "host probes and hooks": lambda _, all_: (
        not any(of(one, kind, "host") for one in handlers(all_) for kind in ("httpGet", "tcpSocket"))
    ),
    "AppArmor": lambda pod, all_: all(
        of(one, "appArmorProfile", "type") in (None, "RuntimeDefault", "Localhost") for one in contexts(pod, all_)
    ),
    "SELinux": lambda pod, all_: all(
        of(one, "seLinuxOptions", "type") in SELINUX
        and not of(one, "seLinuxOptions", "user")
        and not of(one, "seLinuxOptions", "role")
        for one in contexts(pod, all_)
    ),
    "/proc mount": lambda pod, all_: all(one.get("procMount", "Default") == "Default" for one in contexts(pod, all_)),
    "sysctls": lambda pod, _: not of(pod, "securityContext", "sysctls"),  # some are allowed; none is needed
    "volume types": lambda pod, _: all({*one} - {"name"} <= VOLUMES for one in pod.get("volumes", [])),
    "privilege escalation": lambda _, all_: all(
        of(one, "securityContext", "allowPrivilegeEscalation") is False for one in all_
    ),
    "running as non-root": lambda pod, all_: all(
        (of(one, "securityContext", "runAsNonRoot") is not False)
        and (of(one, "securityContext", "runAsNonRoot") or of(pod, "securityContext", "runAsNonRoot") is True)
        for one in all_
    ),
    "non-root user": lambda pod, all_: all(one.get("runAsUser") != 0 for one in contexts(pod, all_)),
    "seccomp": lambda pod, all_: all(
        (of(one, "securityContext", "seccompProfile", "type") or of(pod, "securityContext", "seccompProfile", "type"))
        in ("RuntimeDefault", "Localhost")
        for one in all_
    ),
    "capabilities": lambda _, all_: all(
        "ALL" in (of(one, "securityContext", "capabilities", "drop") or [])
        and {*(of(one, "securityContext", "capabilities", "add") or [])} <= {"NET_BIND_SERVICE"}
        for one in all_
    ),
}


def broken(pod: Any) -> set[str]:
    containers = [one for key in ("containers", "initContainers", "ephemeralContainers") for one in pod.get(key, [])]
    return {name for name, rule in RESTRICTED.items() if not rule(pod, containers)}


def test_restricted() -> None:
    assert broken(pod_template()) == set()


SPOILS: dict[str, list[Callable[[Any, Any], Any]]] = {  # of a rule: what breaks it, in the pod or in its container
    "HostProcess": [lambda pod, _: pod["securityContext"].update(windowsOptions={"hostProcess": True})],
    "host namespaces": [lambda pod, _: pod.update(hostIPC=True), lambda pod, _: pod.update(hostNetwork=True)],
    "privileged containers": [lambda _, one: one["securityContext"].update(privileged=True)],
    "capabilities, baseline": [lambda _, one: one["securityContext"]["capabilities"].update(add=["IPC_LOCK"])],
    "HostPath volumes": [lambda pod, _: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}})],
    "host ports": [lambda _, one: one.update(ports=[{"containerPort": 1, "hostPort": 1}])],
    "host probes and hooks": [
        lambda _, one: one.update(livenessProbe={"httpGet": {"host": "10.0.0.1"}}),
        lambda _, one: one.update(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1"}}}),
    ],
    "AppArmor": [lambda pod, _: pod["securityContext"].update(appArmorProfile={"type": "Unconfined"})],
    "SELinux": [lambda _, one: one["securityContext"].update(seLinuxOptions={"type": "spc_t"})],
    "/proc mount": [lambda _, one: one["securityContext"].update(procMount="Unmasked")],
    "sysctls": [lambda pod, _: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax", "value": "1"}])],
    "volume types": [lambda pod, _: pod["volumes"].append({"name": "x", "nfs": {"server": "x", "path": "/"}})],
    "privilege escalation": [
        lambda _, one: one["securityContext"].pop("allowPrivilegeEscalation"),
        lambda _, one: one["securityContext"].update(allowPrivilegeEscalation=True),
    ],
    "running as non-root": [
        lambda pod, _: pod["securityContext"].pop("runAsNonRoot"),
        lambda _, one: one["securityContext"].update(runAsNonRoot=False),
    ],
    "non-root user": [lambda pod, _: pod["securityContext"].update(runAsUser=0)],
    "seccomp": [
        lambda pod, _: pod["securityContext"].pop("seccompProfile"),
        lambda _, one: one["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    ],
    "capabilities": [
        lambda _, one: one["securityContext"].pop("capabilities"),
        lambda _, one: one["securityContext"]["capabilities"].update(add=["CHOWN"]),
        lambda pod, _: pod.update(initContainers=[{"name": "x", "securityContext": {"runAsNonRoot": True}}]),
    ],
}


@pytest.mark.parametrize("rule", RESTRICTED)
def test_mutant_of_a_rule(rule: str) -> None:
    for spoil in SPOILS[rule]:
        pod = copy.deepcopy(pod_template())
        spoil(pod, pod["containers"][0])
        assert rule in broken(pod)


# --- the command -----------------------------------------------------------------------------------------


def command(out: Path, *args: str) -> list[str]:
    """The container's command with other arguments, for this machine's folders."""
    words = [word.replace("/workspace", str(runner.ROOT)).replace("/runs", str(out)) for word in TRAINER["command"]]
    assert words[2].count(str(runner.ROOT)) == 1
    return [*words, *args]


def planned(out: Path, **variables: str) -> list[str]:
    """How the launcher would call torchrun in a pod."""
    (recipe, *flags) = TRAINER["args"]
    result = shell(command(out, "--dry-run", recipe, *flags), **(PLUGIN | {"PET_NODE_RANK": "1"} | variables))
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def test_script() -> None:
    script = TRAINER["command"][2]
    assert not re.search(r"\$[($]", script), "Kubernetes would expand it, in command and in args"
    result = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_mapping(tmp_path: Path) -> None:
    """Each of the plugin's variables as the option of torchrun that it means; the folder is that of the job's name."""
    words = planned(tmp_path)
    for word in (
        *("--nnodes=2", f"--rdzv-endpoint={JOB}-node-0-0.{JOB}:29500", f"--rdzv-id={JOB}"),
        *("--rdzv-conf=is_host=0,last_call_timeout=5", "--nproc-per-node=2"),
    ):
        assert word in words
    train = words.index(f"{TRAINER['args'][0]}/train.py")
    assert words[train + 1 :] == [*TRAINER["args"][1:], "--out", str(tmp_path), "--name", JOB]


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"PET_NODE_RANK": "0"}, "--rdzv-conf=is_host=1,last_call_timeout=5"),
        ({"PET_NNODES": "2:4"}, "--nnodes=2:4"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, "--rdzv-endpoint=here"),
        ({"PET_NPROC_PER_NODE": "5"}, "--nproc-per-node=5"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "--nproc-per-node=3"),
        ({"PET_NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": "0,1,2"}, "--nproc-per-node=3"),
    ],
)
def test_values(variables: dict[str, str], word: str, tmp_path: Path) -> None:
    assert word in planned(tmp_path, **variables)


def test_torchrun_sees_no_defaults(tmp_path: Path) -> None:
    """torchrun would take PET_* as defaults of its options."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    variables = PLUGIN | {"PET_NODE_RANK": "1", "PYTHON": str(python)}
    result = shell(command(tmp_path, TRAINER["args"][0]), **variables)
    assert result.returncode == 0, result.stderr
    assert "\nPYTHONPATH=" in f"\n{result.stdout}"
    assert "PET_" not in result.stdout


def test_variable_left_out(tmp_path: Path) -> None:
    """Under a runtime that is not torch's, it says what it misses."""
    result = shell(command(tmp_path, TRAINER["args"][0]))
    assert result.returncode != 0
    assert "PET_MASTER_ADDR: unbound variable" in result.stderr
    assert not result.stdout


def test_code_of_a_failure(tmp_path: Path) -> None:
    """What the launcher exits with, the pod does, and at once."""
    result = shell(command(tmp_path, "recipes/nothing"), **(PLUGIN | {"PET_NODE_RANK": "1"}))
    assert result.returncode == 2
    assert "recipes/nothing has no train.py" in result.stderr


def ends(pods: list[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    """How each has ended; none outlives this."""
    try:
        return [wait(pod) for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)


@pytest.mark.rest
def test_two_pods(small_digits: Path, tmp_path: Path) -> None:
    """One world of two; when one pod is deleted neither counts as done; started again, they go on and finish."""
    steps = ["--global-batch-size", "8", "--log-every", "1", "--data", str(small_digits)]
    # The rendezvous needs a name that resolves here; it is the job's name as well.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    plugin = PLUGIN | {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    run = tmp_path / "localhost"

    def start(max_steps: int) -> list[subprocess.Popen[str]]:
        words = command(tmp_path, TRAINER["args"][0], *steps, "--max-steps", str(max_steps))
        return [popen(words, tmp_path, plugin | {"PET_NODE_RANK": str(i)}) for i in range(2)]

    pods = start(10_000)
    assert pods[0].stdout
    told = ""
    for line in pods[0].stdout:
        told += line
        if line.startswith("step "):
            break
    os.kill(pods[1].pid, signal.SIGTERM)
    results = ends(pods)
    told += results[0].stdout
    assert "2 processes on 2 hosts" in told, told + results[0].stderr
    assert "stopped  checkpoint saved (SIGTERM on rank 1" in told
    assert [result.returncode for result in results] == [143, 143], [result.stderr for result in results]
    left = json.loads((run / "stopped.json").read_text())["step"]
    assert f"step_{left:08d}" in {path.name for path in (run / "checkpoints").iterdir()}

    results = ends(start(left + 2))
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    assert f"done     step {left + 2} of {left + 2}" in results[0].stdout
    assert list(runner.records(run, "train/loss")) == list(range(1, left + 3))
    assert (run / "checkpoints" / f"step_{left + 2:08d}" / "MANIFEST.json").is_file()
    assert not (run / "stopped.json").exists()

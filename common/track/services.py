"""The trackers: those that Brigade knows, and those that other packages add as entry points of `brigade.trackers`.

    [project.entry-points."brigade.trackers"]
    mine = "my_package.tracking:begin"  # called as begin(about: About) -> Service

Each is called in a process of its own, may block there, and may raise whatever it likes.
"""

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from common import UserError

GROUP = "brigade.trackers"
LOG = "logs/tracker.log"  # in the run's folder: what a tracker prints
DONE = b"done"  # the run has ended, and was not killed
GRACE_S = 10.0  # until a process is killed that does not even notice how long it has waited


@dataclass(frozen=True)
class About:
    """A run.

    Attributes:
        project: the name of the recipe's folder.
        name: of the run.
        config: what config.json says, with the flags at the top, and without the digests of the code.
        id: by which the tracker knows it since an earlier start; "" at the first one.
    """

    project: str
    name: str
    config: dict[str, Any]
    id: str


@dataclass(frozen=True)
class Service:
    """A run in a tracker.

    Attributes:
        where: URL or folder, to look at.
        id: by which the tracker knows it.
        log: takes a step and its numbers by tag. Some of a step may come later than others; no step comes twice.
        finish: takes whether the run has ended, and was not killed. It may continue all the same.
    """

    where: str
    id: str
    log: Callable[[int, Mapping[str, float]], Any]
    finish: Callable[[bool], Any]


def wait_s() -> float:
    """Seconds that the end of a run waits for its tracker."""
    return float(os.environ.get("TRACKER_WAIT_S", "30"))


def begin_wandb(about: About) -> Service:
    """Send to Weights & Biases, which gets what is recorded, and nothing that it would collect by itself."""
    import wandb

    collected = ("disable_code", "disable_git", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
    off: dict[str, Any] = {**dict.fromkeys(collected, True), "x_save_requirements": False, "console": "off", "host": ""}
    settings = wandb.Settings(**off)
    project = os.environ.get("WANDB_PROJECT", about.project)
    run = wandb.init(project=project, name=about.name, id=about.id or None, resume="allow", settings=settings)
    run.config.update(about.config, allow_val_change=True)
    where = run.url or os.path.dirname(run.dir)  # offline: `wandb sync` takes this folder
    return Service(where, run.id, lambda step, values: run.log({**values}, step), lambda ok: run.finish(int(not ok)))


def begin_mlflow(about: About) -> Service:
    """Send to MLflow, whose parameters cannot change: it keeps those of the first start."""
    # `send` asks again itself, and says why; MLflow would be silent for minutes.
    for name, value in (("MAX_RETRIES", "1"), ("TIMEOUT", "20")):
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", about.project)
    if about.id:
        run = client.get_run(about.id)
        client.update_run(about.id, "RUNNING")
    else:
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        run = client.create_run(experiment, run_name=about.name)
    known = run.data.params
    params = [Param(key, str(value)[:6000]) for key, value in _flat(about.config) if key not in known]
    for first in range(0, len(params), 100):  # MLflow takes no more at once
        client.log_batch(run.info.run_id, params=params[first : first + 100])

    def log(step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        for first in range(0, len(metrics), 1000):
            client.log_batch(run.info.run_id, metrics=metrics[first : first + 1000])

    page = f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    where = str(get_tracking_uri())
    where += page if where.startswith("http") else ""
    ends = {True: "FINISHED", False: "FAILED"}
    return Service(where, run.info.run_id, log, lambda ok: client.set_terminated(run.info.run_id, ends[ok]))


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Names and values, where a value is no dict: {"versions": {"torch": "2.15"}} is `versions.torch`."""
    found = []
    for key, value in config.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def begin_trackio(about: About) -> Service:
    """Send to trackio, which finds a run by its name, the newest one."""
    import trackio
    from trackio.utils import TRACKIO_DIR

    project = os.environ.get("TRACKIO_PROJECT", about.project)
    run = trackio.init(
        project=project,
        name=about.id or about.name,
        config=about.config,
        resume="allow" if about.id else "never",
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    here = f"{TRACKIO_DIR} (trackio show --project {project})"
    where = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL") or here
    # trackio has no word for numbers that are not finite.
    finite = math.isfinite
    return Service(
        where,
        run.name,
        lambda step, values: run.log({tag: value for tag, value in values.items() if finite(value)}, step),
        lambda _: run.finish(),
    )


BEGIN = {"mlflow": begin_mlflow, "trackio": begin_trackio, "wandb": begin_wandb}


def check(name: str) -> None:
    """Look for a tracker.

    Raises:
        UserError: nobody knows it, or its package is not installed.
    """
    known = sorted({*BEGIN, *entry_points(group=GROUP).names})
    if name not in known:
        raise UserError(f"--tracker {name} is unknown: it may be {', '.join(known)} (entry points of {GROUP})")
    if name in BEGIN and not importlib.util.find_spec(name):
        raise UserError(f"--tracker {name} needs a package that is not installed: pip install {name}")
    if name == "mlflow" and not (os.environ.get("MLFLOW_TRACKING_URI") or importlib.util.find_spec("sqlalchemy")):
        raise UserError("--tracker mlflow: set MLFLOW_TRACKING_URI, or `pip install mlflow`: skinny has no store")


def find(name: str) -> Callable[[About], Service]:
    """What begins a run in a tracker that was checked; another package's comes before Brigade's own."""
    for one in entry_points(group=GROUP, name=name):
        return one.load()
    return BEGIN[name]

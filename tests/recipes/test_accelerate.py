"""Accelerate rather trains something else than refuse: recipes/accelerate_gpt refuses, or trains what was asked for."""

import json
import math
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from launch import strategy
from tests.conftest import write_text
from tests.harness import mutants, runner
from tests.launch.test_launch import assert_trained, launch, shell, training_flags
from tests.recipes.test_bad_input import assert_refused
from tests.recipes.test_equivalence import COARSE, FLAGS, MICRO_BATCH, RATES, STEPS, plain_gpt_loop, worst

HUGGING = "accelerate_gpt"
TRAIN = runner.ROOT / "recipes" / HUGGING / "train.py"
CONFIGS = sorted((runner.ROOT / "recipes" / HUGGING / "configs").glob("*.yaml"))
CPU, DDP, FSDP2, HSDP = CONFIGS
ACCELERATE = Path(sys.executable).with_name("accelerate")
# Of the standing part of `accelerate launch`: in the ranks of every launch.
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
ODD = ("--mlp-width", "45")  # parts of unequal size


def start(recipe: str, argv: Sequence[str], variables: Mapping[str, str | None], stand_in: str) -> None:
    """Run the recipe in this process, in another environment; None takes a variable away."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if stand_in:
        STAND_INS[stand_in]()
    sys.argv = [recipe, *argv]
    runpy.run_path(recipe, run_name="__main__")


def believe_in_gpus() -> None:
    """A STAND-IN: no machine of the tests has GPUs, and on a CPU Accelerate ignores its FSDP plugin.

    It is made to take the processes for several GPUs, with gloo, and with the CPU as the device. What follows from
    that is Accelerate's own code: the plugin made of the file, prepare, no_sync, clip_grad_norm_.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def believe_in_deepspeed() -> None:
    """A STAND-IN for a machine that has DeepSpeed installed, which Accelerate then ignores on a CPU."""
    from accelerate import accelerator

    accelerator.is_deepspeed_available = lambda: True
    accelerator.compare_versions = lambda *_: False
    accelerator.DeepSpeedPlugin = object


def register_tracker() -> None:
    """A tracker of one's own, which needs no account: one line of JSON for each call."""
    from accelerate.tracking import GeneralTracker, on_main_process, register_tracker_class

    class Lines(GeneralTracker):
        name = "lines"
        requires_logging_directory = False
        tracker = None

        def __init__(self, run_name: str) -> None:
            super().__init__()

        def _write(self, *line: Any) -> None:
            with Path(os.environ["LINES"]).open("a") as file:
                file.write(json.dumps(line) + "\n")

        @on_main_process
        def start(self) -> None:
            self._write("start")

        @on_main_process
        def store_init_configuration(self, values: dict) -> None:
            self._write("flags", values)

        @on_main_process
        def log(self, values: dict, step: int | None = None, **_: Any) -> None:
            self._write(step, {name: float(value) for name, value in values.items()})

        @on_main_process
        def finish(self) -> None:
            self._write("finish")

    register_tracker_class(Lines)


STAND_INS = {"GPUs": believe_in_gpus, "DeepSpeed": believe_in_deepspeed, "tracker": register_tracker}


def run(
    size: int,
    *flags: str,
    recipe: Path = TRAIN,
    variables: Mapping[str, str | None] | None = None,
    stand_in: str = "",
) -> runner.Result:
    one = (str(recipe), flags, variables or {}, stand_in)
    return runner.spawn(start, [one] * size)


def trained(size: int, out: Path, data: Path, *flags: str, **how: Any) -> list[dict[int, float]]:
    """Loss, gradient norm and validation loss by step."""
    sizes = (*runner.SMALL["gpt"], "--lr", str(2 * RATES["gpt"]), "--micro-batch-size", str(MICRO_BATCH // size))
    result = run(size, *FLAGS, *sizes, "--data", str(data), "--out", str(out), "--name", "run", *flags, **how)
    assert result.ok, str(result)
    return [runner.records(out / "run", tag) for tag in ("train/loss", "train/grad_norm", "val/loss")]


def refused(tmp_path: Path, size: int, variables: Mapping[str, str | None], *messages: str, **how: Any) -> None:
    result = run(size, "--out", str(tmp_path / "out"), "--dtype", "float32", variables=variables, **how)
    assert_refused(result, *messages)
    assert not (tmp_path / "out").exists()


def sharding(config: Path, size: int, **more: str) -> dict[str, str | None]:
    """The variables of a file for this many ranks; of HSDP, in groups of two."""
    shards = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"} if config == HSDP else {}
    return strategy.environment(str(config)) | {strategy.PROCESSES: str(size)} | shards | more


# --- what else would come of it ---------------------------------------------------------------------------

SPLIT = "tp x cp x sp size is 2, not 1: use recipes/tensor_gpt, or a shorter --seq-len"
# Of a file: what the environment then holds, and the refusal.
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "another precision": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        "Accelerate's mixed_precision is fp16, not no: --dtype float32 decides it",
    ),
    "bfloat16 beside --dtype float32": (
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        "mixed_precision is bf16, not no: --dtype float32 decides it",
    ),
    "a file that this launcher does not read": (
        {"ACCELERATE_CONFIG": "configs/ddp.yaml"},
        "config file is configs/ddp.yaml, not none: only launch/torchrun.sh and slurm.sh read it",
    ),
    "compiled": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend is INDUCTOR, not NO: use --compile"),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "gradient_accumulation_steps is 4, not 1: use --micro-batch-size",
    ),
    "DeepSpeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "Accelerate refuses its config file"),
    "Megatron": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Accelerate refuses its config file"),
    "FSDP": ({"ACCELERATE_USE_FSDP": "true"}, "strategy is MULTI_CPU, not FSDP2"),
    "a compiler that is not there": ({"ACCELERATE_DYNAMO_BACKEND": "FOO"}, "Accelerate refuses its config file"),
    "another device": ({"ACCELERATE_TORCH_DEVICE": "meta"}, "device is meta, not cpu"),
    # Which Accelerate ignores without ACCELERATE_USE_PARALLELISM_CONFIG.
    "shards, ignored": ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "dp_shard_size is 2, not 1: only"),
    "tensor parallel, ignored": ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, SPLIT),
    "context parallel, ignored": ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, SPLIT),
    "sequence parallel, ignored": ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, SPLIT),
    # On a CPU Accelerate says so itself.
    "tensor parallel": (PARALLEL | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "ParallelismConfig is only compatible"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_asks_for_more(case: str, tmp_path: Path) -> None:
    variables, message = REFUSED[case]
    refused(tmp_path, 2, LAUNCHED | variables, message)


# As above, where Accelerate believes that the processes have GPUs.
REFUSED_ON_GPUS: dict[str, tuple[dict[str, str | None], str]] = {
    "FSDP1": (
        sharding(FSDP2, 2, FSDP_VERSION="1", FSDP_SYNC_MODULE_STATES="false", FSDP_RESHARD_AFTER_FORWARD="FULL_SHARD"),
        "strategy is FSDP, not FSDP2: use configs/fsdp2.yaml on GPUs, or recipes/fsdp_gpt",
    ),
    "offload": (sharding(FSDP2, 2, FSDP_OFFLOAD_PARAMS="true"), "CPU offload is True, not False: use more GPUs"),
    "shards without FSDP": (
        LAUNCHED | PARALLEL | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        "dp_shard_size is 2, not 1: only distributed_type: FSDP shards",
    ),
    "tensor parallel": (LAUNCHED | PARALLEL | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, SPLIT),
    "context parallel": (sharding(FSDP2, 2, **PARALLEL, PARALLELISM_CONFIG_CP_SIZE="2"), SPLIT),
    "sequence parallel": (LAUNCHED | PARALLEL | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, SPLIT),
}


@pytest.mark.parametrize("case", REFUSED_ON_GPUS)
def test_file_that_asks_for_more_on_gpus(case: str, tmp_path: Path) -> None:
    variables, message = REFUSED_ON_GPUS[case]
    refused(tmp_path, 2, variables, message, stand_in="GPUs")


def test_deepspeed_on_a_cpu(tmp_path: Path) -> None:
    """Where it is installed Accelerate ignores it there, and trains by DDP."""
    variables = LAUNCHED | {"ACCELERATE_USE_DEEPSPEED": "true"}
    refused(tmp_path, 2, variables, "strategy is MULTI_CPU, not FSDP2", stand_in="DeepSpeed")


ALONE_HERE = "Accelerate's num_processes is 1, not several: use configs/cpu.yaml, or set NPROC_PER_NODE"


def test_one_process_in_the_place_of_two(tmp_path: Path) -> None:
    """What `accelerate launch --cpu --num_processes 2` leaves in the environment of the one that it starts."""
    variables = LAUNCHED | {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    refused(tmp_path, 1, variables, ALONE_HERE)


def test_file_for_another_number_of_processes(tmp_path: Path) -> None:
    refused(tmp_path, 3, strategy.environment(str(CPU)), "Accelerate's num_processes is 3, not 2")


@pytest.mark.parametrize("spelt", ["true", "True"])  # Accelerate takes both
def test_sharding_on_a_cpu(spelt: str, tmp_path: Path) -> None:
    message = "Accelerate's strategy is MULTI_CPU, not FSDP2: use configs/fsdp2.yaml on GPUs, or recipes/fsdp_gpt"
    refused(tmp_path, 2, sharding(FSDP2, 2, ACCELERATE_USE_FSDP=spelt), message)


def test_sharding_of_groups_on_a_cpu(tmp_path: Path) -> None:
    message = "Accelerate refuses its config file (configs/cpu.yaml trains without GPUs): ParallelismConfig"
    refused(tmp_path, 4, sharding(HSDP, 4), message)


def test_file_on_one_machine_only(tmp_path: Path) -> None:
    """As of two machines that were started by hand: before one builds FSDP2 and the other DDP."""
    one = (str(TRAIN), ("--out", str(tmp_path / "out")))
    result = runner.spawn(start, [(*one, LAUNCHED, ""), (*one, {}, "")])
    assert_refused(result, "rank 1 was started with accelerate ACCELERATE_")
    assert not (tmp_path / "out").exists()


def test_ranks_that_believe_that_they_are_alone(tmp_path: Path) -> None:
    """Of torchrun on a CPU, they are, without what the recipe says about the CPU: then it refuses."""
    mutant = mutants.mutate(HUGGING, tmp_path, {"make_accelerator": {'device.type == "cpu"': "None"}})
    result = run(2, "--out", str(tmp_path / "out"), recipe=mutant)
    assert_refused(result, "Accelerate's num_processes is 1, not 2")


def test_what_is_not_used() -> None:
    """load_state races with save_state, and end_training takes the process group down."""
    assert not re.findall(
        r"\.(load_state|save_state|end_training|accumulate|skip_first_batches)\(", runner.source(HUGGING)
    )


# --- launchers --------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_accelerate_launch(epoch_text: Path, tmp_path: Path) -> None:
    """A default file of the user's changes nothing beside --config_file, and is refused for itself."""
    default = tmp_path / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\ndynamo_backend: EAGER\n")
    where = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(runner.ROOT)}
    flags = [*training_flags(epoch_text, tmp_path / "out", "run"), *runner.small("ddp_gpt"), "--dtype", "float64"]
    port = ("--main_process_port", "0")
    result = shell([ACCELERATE, "launch", *port, "--config_file", CPU, TRAIN, *flags], **where)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trained(tmp_path / "out" / "run", 2)
    assert f" accelerate launch --config_file FILE {TRAIN} " in result.stdout
    other = runner.run_recipe("ddp_gpt", 2, *flags, "--name", "other")
    assert other.ok, str(other)
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        wanted = runner.records(tmp_path / "out" / "other", tag)
        assert runner.records(tmp_path / "out" / "run", tag) == pytest.approx(wanted, rel=1e-9), tag

    result = shell([ACCELERATE, "launch", *port, TRAIN, *flags, "--name", "default"], **where)
    assert result.returncode, result.stdout
    assert "error: Accelerate's dynamo_backend is EAGER, not NO: use --compile\n" in result.stderr
    assert not (tmp_path / "out" / "default").exists()


def test_command_that_resumes(tmp_path: Path, epoch_text: Path) -> None:
    """`accelerate launch` tells the ranks nothing of its file; another launcher has said already how it was started."""
    recipe = mutants.mutate(HUGGING, tmp_path / "my project", {})
    for launched_as, wanted in (
        (None, f"accelerate launch --config_file FILE '{recipe}'"),
        ("my_launcher x", "my_launcher x"),
    ):
        out = ("--out", str(tmp_path / "out"), "--name", wanted[:4], "--stop-after", "1")
        variables = LAUNCHED | {"LAUNCHED_AS": launched_as}
        result = run(1, *out, *runner.small(HUGGING), "--data", str(epoch_text), recipe=recipe, variables=variables)
        assert result.ok, str(result)
        assert f" {wanted} --out " in result.outputs[0], str(result)


def test_accelerate_launch_starts_one_on_a_cpu(tmp_path: Path) -> None:
    words = ("--cpu", "--num_processes", "2", TRAIN, "--out", tmp_path / "out")
    result = shell([ACCELERATE, "launch", *words], PYTHONPATH=str(runner.ROOT), HF_HOME=str(tmp_path))
    assert result.returncode, result.stdout
    assert result.stderr.count(f"error: {ALONE_HERE}") == 1
    assert not (tmp_path / "out").exists()


def test_cpu_is_part_of_the_file() -> None:
    """Accelerate says so to one process only; several on a machine with GPUs would train there."""
    assert strategy.environment(str(CPU))["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in strategy.environment(str(DDP))


@pytest.mark.rest
def test_torchrun_with_a_file(epoch_text: Path, tmp_path: Path) -> None:
    flags = [*training_flags(epoch_text, tmp_path / "out", "run"), *runner.small("ddp_gpt")]
    result = launch(f"recipes/{HUGGING}", *flags, ACCELERATE_CONFIG="configs/cpu.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trained(tmp_path / "out" / "run", 2)
    assert "ACCELERATE_CONFIG=configs/cpu.yaml bash " in result.stdout, "the way to go on keeps the file"


BAD_FILES = {
    "": "is no config file of Accelerate",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n": "fsdp_versoin is not known",
    "distributed_type: FSDP\nsharding: 2\n": "unknown keys (['sharding'])",
    "distributed_type: FSDP\nfsdp_config: 3\n": "is no config file of Accelerate",
    "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backnd: EAGER\n": "dynamo_backnd is not known",
    "distributed_type: MULTI_GPU\ngpu_ids: 0,1\n": "gpu_ids 0,1: set CUDA_VISIBLE_DEVICES instead",
    "distributed_type: DEEPSPEED\n": "distributed_type DEEPSPEED, and not NO, MULTI_CPU, MULTI_GPU, FSDP",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_file(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(BAD_FILES[text])) as refusal:
        strategy.environment(str(tmp_path / "bad.yaml"))
    assert "\n" not in str(refusal.value)
    assert str(tmp_path / "bad.yaml") in str(refusal.value)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    result = launch(f"recipes/{HUGGING}", "--out", tmp_path / "out", ACCELERATE_CONFIG="configs/nowhere.yaml")
    assert result.returncode == strategy.USAGE_ERROR
    assert result.stderr.startswith("error: ACCELERATE_CONFIG="), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("config", [DDP, HSDP], ids=lambda path: path.stem)
def test_environment_is_that_of_accelerate_launch(config: Path, tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    words = ("--num_processes", "1", "--main_process_port", "0", "--config_file", config, script)
    told = shell([ACCELERATE, "launch", *words]).stdout.splitlines()[-1]
    theirs = {name: value for name, value in json.loads(told).items() if name.startswith(strategy.STRATEGY)}
    ours = strategy.environment(str(config))
    assert {name: value for name, value in ours.items() if name != strategy.PROCESSES} == theirs


# --- FSDP2, which Accelerate believes to be on GPUs -------------------------------------------------------


def holders(run: Path, name: str) -> int:
    """How many files of its newest checkpoint have a part of a tensor."""
    newest = max(run.glob("checkpoints/step_*"))
    found = 0
    for path in newest.glob("shard-*"):
        with safe_open(path, "pt") as file:
            found += name in file.keys()  # noqa: SIM118 (not a dict)
    return found


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param(FSDP2, 2, id="fsdp2-2"),
        pytest.param(FSDP2, 3, id="fsdp2-3", marks=pytest.mark.rest),
        pytest.param(HSDP, 4, id="hsdp-4", marks=pytest.mark.rest),
    ],
)
def test_fsdp2_stand_in(config: Path, size: int, epoch_text: Path, tmp_path: Path) -> None:
    wanted = plain_gpt_loop(str(epoch_text), torch.float64, (("mlp_width", 45),))
    how = {"variables": sharding(config, size), "stand_in": "GPUs"}
    found = trained(size, tmp_path, epoch_text, "--dtype", "float64", *ODD, **how)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    # The plain loop evaluates after each of several steps; this run may do so less often.
    assert STEPS in found[2]
    assert found[2] == {step: pytest.approx(wanted.held_out[step], rel=1e-9) for step in found[2]}
    (tmp_path / "ddp").mkdir()
    trained(size, tmp_path / "ddp", epoch_text, "--dtype", "float64", "--stop-after", "1", *ODD)
    shares = [holders(one / "run", "embed.weight") for one in (tmp_path, tmp_path / "ddp")]
    assert shares == [2 if config == HSDP else size, 1], "each rank of a group has a part to write"


def test_more_of_a_file(epoch_text: Path, tmp_path: Path) -> None:
    """What changes no number is left to the file."""
    wanted = plain_gpt_loop(str(epoch_text), torch.float64, tied=True)
    more = {"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    more |= {"FSDP_RESHARD_AFTER_FORWARD": "false"}
    followed = "assert any('_checkpoint_wrapped_module' in name for name, _ in model.named_modules())"
    recipe = mutants.mutate(HUGGING, tmp_path, {"parallelize": {"return model": f"{followed}; return model"}})
    how = {"variables": sharding(FSDP2, 2) | more, "stand_in": "GPUs", "recipe": recipe}
    found = trained(2, tmp_path, epoch_text, "--dtype", "float64", "--tied", **how)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9


@pytest.mark.rest
def test_checkpoints_of_the_stand_in(epoch_text: Path, tmp_path: Path) -> None:
    """From FSDP2 to pipeline stages, to DDP on 3 ranks, and back to FSDP2: one training."""
    wanted = plain_gpt_loop(str(epoch_text), torch.float64)
    shared = {"variables": sharding(FSDP2, 2), "stand_in": "GPUs"}
    pipeline = {"recipe": runner.ROOT / "recipes" / "pipeline_gpt" / "train.py"}
    layout = runner.Layout("pipeline_gpt", size=2, flags=("--pp", "2"), dp_size=1)
    legs: list[tuple[int, int, dict[str, Any]]] = [(1, 2, shared), (2, 2, pipeline), (3, 3, {}), (5, 2, shared)]
    for i, (stop, size, how) in enumerate(legs):
        stages = (*layout.flags, *layout.micro_batches(MICRO_BATCH)) if how == pipeline else ()
        before = ("--resume", str(tmp_path / str(i - 1) / "run")) if i else ()
        flags = ("--dtype", "float64", "--stop-after", str(stop), *stages, *before)
        losses, norms, _ = trained(size, tmp_path / str(i), epoch_text, *flags, **how)
        assert list(losses) == list(range(legs[i - 1][0] + 1 if i else 1, stop + 1))
        for found, values in ((losses, wanted.losses), (norms, wanted.norms)):
            assert found == pytest.approx({step: values[step - 1] for step in found}, rel=1e-9), i


@pytest.mark.rest
def test_bfloat16_of_the_stand_in(epoch_text: Path, tmp_path: Path) -> None:
    """As in fsdp_gpt, gradients are added up in float32; with Accelerate's own policy losses have 8 bits."""
    variables = sharding(FSDP2, 2, ACCELERATE_MIXED_PRECISION="bf16")
    how: dict[str, Any] = {"variables": variables, "stand_in": "GPUs"}
    flags = ("--dtype", "bfloat16", "--stop-after", "3")
    (tmp_path / "mutant").mkdir()
    policy = "plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, precision.param_dtype(dtype))"
    mutant = {"recipe": mutants.mutate(HUGGING, tmp_path / "mutant", {"parallelize": {policy: "pass"}})}
    fsdp = {"recipe": runner.ROOT / "recipes" / "fsdp_gpt" / "train.py"}
    curves = [
        trained(2, tmp_path / name, epoch_text, *flags, **which)[0]
        for name, which in (("fsdp", fsdp), ("ours", how), ("theirs", how | mutant))
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=COARSE["bfloat16"])
    assert curves[2] != pytest.approx(curves[0], rel=1e-4)


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    """What Accelerate itself refuses is told in one line."""
    variables = strategy.environment(str(HSDP)) | {strategy.PROCESSES: "2"}
    result = run(2, "--out", str(tmp_path / "out"), variables=variables, stand_in="GPUs")
    assert_refused(result, "Accelerate refuses its config file")


# --- evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.rest)])
def test_evaluation_is_exact(count: int, tmp_path: Path) -> None:
    """Each held-out sequence counts once, also where there are fewer than ranks."""
    data = write_text(tmp_path / "data", 101, count)
    flags = ("--dtype", "float64", "--stop-after", "1", "--eval-every", "1")
    wanted = trained(1, tmp_path / "1", data, *flags)[2]
    assert list(wanted) == [1], "a stop alone causes no evaluation"
    assert trained(4, tmp_path / "4", data, *flags)[2] == pytest.approx(wanted, rel=1e-12)
    how = {"variables": sharding(FSDP2, 4), "stand_in": "GPUs"}  # whose ranks wait for each other in each forward pass
    assert trained(4, tmp_path / "fsdp2", data, *flags, **how)[2] == pytest.approx(wanted, rel=1e-12)
    requests = "data.evaluation(validation, plan, {}, args.workers, world.device)"
    all_read_the_same = {"main": {requests.format("dp_rank"): requests.format("0")}}
    mutant = mutants.mutate(HUGGING, tmp_path / "mutant", all_read_the_same)
    found = trained(4, tmp_path / "5", data, *flags, recipe=mutant)[2]
    assert count == 1 or found != pytest.approx(wanted, rel=1e-4)  # one sequence, read four times, has the same mean


# --- what is set on Accelerate's wrapper ------------------------------------------------------------------


def test_mutant_whose_optimizer_is_wrapped(epoch_text: Path, tmp_path: Path) -> None:
    """torch's optimizer leaves out an update, when the guard tells it so; Accelerate's wrapper around it does not."""
    from tests.harness import inject

    (tmp_path / "mutant").mkdir()
    made = "make_optimizer(args, model)"
    mutant = mutants.mutate(HUGGING, tmp_path / "mutant", {"main": {made: f"model.accelerator.prepare({made})"}})
    sizes = (*runner.SMALL["gpt"], "--max-steps", "4", "--global-batch-size", "4", "--log-every", "1")
    for recipe, finite in ((TRAIN, True), (mutant, False)):
        out = tmp_path / str(finite)
        argv = [*sizes, "--dtype", "float32", "--out", str(out), "--name", "run", "--check-every", "0"]
        faults = [("backward", "spoil", -1, 2)]
        result = runner.spawn(inject.run, [(str(recipe), argv, faults, str(tmp_path / f"{finite}.jsonl"))] * 2)
        assert result.ok == finite, str(result)
        assert finite or "error: not finite at step 4: " in result.outputs[0]
        norms = runner.records(out / "run", "train/grad_norm")
        assert [math.isfinite(norms[step]) for step in (1, 2, 3, 4)] == [True, False, finite, finite]


# --- a tracker, which docs/accelerate-traps.md shows how to add -------------------------------------------


def test_tracker_of_the_docs(epoch_text: Path, tmp_path: Path) -> None:
    """The page's lines send what the log shows to a tracker: once, from rank 0."""
    page = (runner.ROOT / "docs" / "accelerate-traps.md").read_text().partition("## Add a tracker")[2]
    one, two, *in_loop, last = page.split("```python\n")[1].split("```")[0].splitlines()
    loop = "for step in run.steps(dp_rank): ..."
    logs = "run.log_train(step, sums, grad_norm=grad_norm, data_wait_s=batches.wait_s, lr=lr)"
    changes: mutants.Changes = {
        "make_accelerator": {
            'Accelerator(cpu=device.type == "cpu", kwargs_handlers=[ddp])': (
                'Accelerator(cpu=device.type == "cpu", kwargs_handlers=[ddp], log_with="lines")'
            )
        },
        "main": {
            loop: "\n".join((one, two, loop)),
            logs: "\n".join((logs, *in_loop)),
            "run.finish()": f"{last}\nrun.finish()",
        },
    }
    file = tmp_path / "lines.jsonl"
    how: dict[str, Any] = {"recipe": mutants.mutate(HUGGING, tmp_path, changes), "variables": {"LINES": str(file)}}
    losses, *_ = trained(2, tmp_path, epoch_text, "--dtype", "float64", "--stop-after", "3", stand_in="tracker", **how)
    first, flags, *lines, end = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first, flags[0], flags[1]["stop_after"], end) == (["start"], "flags", 3, ["finish"])
    assert {step: values["loss"] for step, values in lines} == losses


def test_commands_of_the_docstring() -> None:
    """The files that it names are there."""
    named = re.findall(r"configs/\w+\.yaml", runner.source(HUGGING) + (TRAIN.parent / "README.md").read_text())
    assert {Path(name).name for name in named} == {config.name for config in CONFIGS}

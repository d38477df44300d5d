"""Run a command in the environment that `accelerate launch --config_file FILE` gives to the ranks it starts.

Accelerate reads its strategy from environment variables, and no other launcher knows its files. The translation is
Accelerate's own; what it sets beside the strategy, addresses and threads, is left to the launcher that runs here.
"""

import os
import sys

from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from common.run.exits import USAGE_ERROR
from launch import private_api

STRATEGY = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
PROCESSES = "ACCELERATE_CONFIG_PROCESSES"  # what recipes/accelerate_gpt compares with the processes that run


def environment(path: str) -> dict[str, str]:
    """The variables that a config file of Accelerate stands for.

    Raises:
        ValueError: it is none, or is for what torchrun cannot start, or Accelerate has changed; says why.
    """
    # A number, or Accelerate refuses files that leave it to the command line; port 0 is any free one.
    words = ["--config_file", path, "--num_processes", "1", "--main_process_port", "0", "train.py"]
    parser = launch_command_parser()
    read_config = private_api.config_reader()
    try:
        known = vars(parser.parse_args(words)).copy()
        asked, config, _ = read_config(parser.parse_args(words))
        made = prepare_multi_gpu_env(asked)
        # Accelerate leaves out without a word what it does not know.
        sharding = {key if key.startswith("fsdp") else f"fsdp_{key}" for key in config.fsdp_config}
        unknown = {*sharding, *config.parallelism_config, *config.dynamo_config} - known.keys()
    except Exception as error:  # of YAML, of a key, of a type
        raise ValueError(
            f"ACCELERATE_CONFIG={path} is no config file of Accelerate: {' '.join(str(error).split())}"
        ) from error
    if unknown:
        raise ValueError(f"ACCELERATE_CONFIG={path}: {', '.join(sorted(unknown))} is not known")
    if config.distributed_type not in TYPES:
        raise ValueError(
            f"ACCELERATE_CONFIG={path}: distributed_type {config.distributed_type.value}, and not {', '.join(TYPES)}"
        )
    if config.gpu_ids not in (None, "all"):
        raise ValueError(f"ACCELERATE_CONFIG={path}: gpu_ids {config.gpu_ids}: set CUDA_VISIBLE_DEVICES instead")
    found = {name: value for name, value in made.items() if name.startswith(STRATEGY)}
    found |= {"ACCELERATE_USE_CPU": "true"} if config.use_cpu else {}  # which Accelerate says to one process only
    return found | ({PROCESSES: str(config.num_processes)} if config.num_processes > 0 else {})


def main() -> None:
    """Become the command, so that signals reach it."""
    os.environ.pop("ACCELERATE_CONFIG", None)  # it is followed here; where nobody did, the recipe refuses it
    try:
        found = environment(sys.argv[1])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    os.execvpe(sys.argv[2], sys.argv[2:], os.environ | found)  # noqa: S606 (no shell, which is what it warns of)


if __name__ == "__main__":
    main()

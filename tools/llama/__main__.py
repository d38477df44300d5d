"""Convert a GPT checkpoint to a Llama, Qwen 2 or 3, Mixtral or Qwen 3 MoE of Hugging Face; these, or a Mistral, back.

`python -m tools.llama`. The models compute the same from tensors of the same layout, so only names change.
"""

from pathlib import Path

from tools import command
from tools.command import Source


def export(path: Source, out: Path, ema: bool = False) -> None:
    """Write the newest undamaged checkpoint of a GPT as a folder that transformers.AutoModelForCausalLM loads.

    The number of heads is not in the weights, so this reads the run's config.json, in the run's folder. The tokenizer
    comes with it: that of the run's --tokenizer, with the settings that lie beside it, or one of bytes.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: the folder to create.
        ema: write the average of the weights that a training with --ema keeps.
    """
    from tools.llama import convert

    convert.export(path, out, ema)


def import_(path: Source, out: Path) -> None:
    """Make a checkpoint of step 0, for --resume, from a folder of config.json and model*.safetensors.

    Args:
        path: the folder of a Llama, Mistral, Qwen 2, Qwen 3, Mixtral or Qwen 3 MoE.
        out: the folder to create, for --resume; its config.json, for --config, has the model's sizes.
    """
    from tools.llama import convert

    convert.import_(path, out)


if __name__ == "__main__":
    command.run({"export": export, "import": import_}, "tools.llama", __doc__)

"""Convert a GPT checkpoint to a Hugging Face Llama and back: `python -m tools.llama`.

The two models compute the same from tensors of the same layout, so only names change.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from common import UserError, manifest
from common.workloads import gpt
from tools.checkpoint import Source, Tensors, beside, read, run, weights, write_start

LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Sizes and constants of the model: our flags to keys of a Llama's config.json.
SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
# Values in config.json that a Llama must have to be our model.
FIXED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_type": "default",
}
# Defaults of transformers for keys that a config.json lacks.
DEFAULTS = FIXED | {
    "model_type": "",
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 0,
    "tie_word_embeddings": False,
}


def names(shape: gpt.Shape) -> dict[str, str]:
    """Llama's name of each tensor, by our name."""
    found = {"embed": "model.embed_tokens", "norm": "model.norm"} | ({} if shape.tied else {"head": "lm_head"})
    for i in range(shape.num_layers):
        found |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in LAYER.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in found.items()}


def renamed(tensors: Tensors, new: dict[str, str]) -> Tensors:
    """Rename tensors.

    Raises:
        UserError: a tensor is missing, or has no new name.
    """
    faults = [f"{name} is missing" for name in new.keys() - tensors.keys()]
    faults += [f"{name} is unexpected" for name in tensors.keys() - new.keys()]
    if faults:
        raise UserError(f"the tensors do not match config.json: {', '.join(sorted(faults)[:5])}")
    return {new[name]: tensor for name, tensor in tensors.items()}


def to_config(shape: gpt.Shape, seq_len: int, dtype: str) -> dict[str, Any]:
    """The config.json that transformers reads.

    Args:
        shape: the model's sizes.
        seq_len: sequence length of the training; the weights themselves set no limit.
        dtype: type of the weights, such as "float32".
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in FIXED.items() if key != "rope_type"},
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": seq_len,
        "torch_dtype": dtype,
        "bos_token_id": None,  # we have no special tokens; with one, generation would stop at it
        "eos_token_id": None,
    }


def from_config(config: dict[str, Any]) -> gpt.Shape:
    """The shape of our model that is equal to a Llama with this config.json.

    Raises:
        UserError: our model cannot be equal to it; names each value that differs.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = DEFAULTS | config | rope | ({"rope_type": rope["type"]} if "type" in rope else {})
    differences = [f"{key} {found[key]!r} (must be {value!r})" for key, value in FIXED.items() if found[key] != value]
    if differences:
        raise UserError(f"config.json describes a Llama that cannot be imported: {', '.join(differences)}")
    shape = gpt.Shape(found["vocab_size"], **{ours: found[theirs] for ours, theirs in SIZES.items()})
    if (found.get("head_dim") or shape.width // shape.num_heads) != shape.width // shape.num_heads:
        raise UserError(
            f"config.json has head_dim {found['head_dim']}; it must be hidden_size / num_attention_heads = "
            f"{shape.width} / {shape.num_heads}"
        )
    return shape


def export(path: Source, out: Path) -> None:
    """Write the newest undamaged checkpoint of a GPT as a folder that transformers.LlamaForCausalLM loads.

    The number of heads is not in the weights, so this reads the run's config.json, in the run's folder.

    The tokenizer.json of the run's --tokenizer comes with it.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: the folder to create.
    """
    with beside(out) as partial:
        folder, step, tensors = weights(path)
        file = folder.parent.parent / "config.json"
        try:
            args = manifest.read_json(file)["args"]
            embedding = tensors["embed.weight"]
            constants = {
                "rope_base": gpt.Shape.rope_base,
                "norm_eps": gpt.Shape.norm_eps,
            }  # of runs without these flags
            shape = gpt.Shape(len(embedding), **{key: (constants | args)[key] for key in SIZES})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} must be a checkpoint of a GPT, with its number of heads in {file}: {error!r}"
            ) from error
        tensors = renamed(tensors, names(shape))
        config = to_config(shape, args.get("seq_len", 2048), str(embedding.dtype).removeprefix("torch."))
        partial.mkdir()
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt", "step": str(step)})
        tokenizer = Path(args.get("tokenizer") or "").expanduser()
        if args.get("tokenizer") and tokenizer.is_file():
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
            about = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config["max_position_embeddings"],
            }
            (partial / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    print(f"{out}: {len(tensors)} tensors of step {step} of {folder}")
    if not (out / "tokenizer.json").exists():
        why = f"--tokenizer {tokenizer} is not there" if args.get("tokenizer") else "its tokens are bytes"
        print(f"note: without a tokenizer.json, because {why}: AutoTokenizer cannot load this folder")


def import_(path: Source, out: Path) -> None:
    """Make a checkpoint of step 0, for --resume, from a Llama's folder of config.json and model*.safetensors.

    Args:
        path: the folder.
        out: the folder to create, for --resume; its config.json, for --config, has the model's sizes.
    """
    with beside(out) as partial:
        file = path / "config.json"
        try:
            shape = from_config(manifest.read_json(file))
            ours = {theirs: name for name, theirs in names(shape).items()}
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a Llama's config.json: {error!r}") from error
        found = read(*(sorted(path.glob("model*.safetensors")) or [path / "model.safetensors"]))
        # Our model computes the rotary frequencies itself.
        found = {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
        tensors = renamed(found, ours)
        flags = {key: getattr(shape, key) for key in SIZES}
        write_start(partial, tensors, path.name)
        (partial / "config.json").write_text(json.dumps({"args": flags}, indent=1))
    sizes = ", ".join(f"{key} {value}" for key, value in flags.items())
    print(f"{out}: {len(tensors)} tensors; {sizes}, vocabulary {shape.vocab_size}")
    beside_it = path / "tokenizer.json"
    tokenizer = beside_it if beside_it.exists() else "FILE"
    flags_line = f"--resume {out} --config {out}/config.json --seq-len N --tokenizer {tokenizer}"
    print(f"to train from them: bash launch/torchrun.sh recipes/ddp_gpt {flags_line}")


if __name__ == "__main__":
    run({"export": export, "import": import_}, "tools.llama", __doc__)

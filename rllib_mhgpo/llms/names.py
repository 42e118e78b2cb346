"""What the config key ``llm`` may say, turned into a folder or a hub id.

Nothing is loaded here, except that the first use of ``smollm2`` converts it into the cache folder.
"""

import os
import re
from pathlib import Path

from rllib_mhgpo.errors import ModelError, did_you_mean

SHIPPED = ("tiny", "tiny_1", "mini")
NAMES = (*SHIPPED, "smollm2")


def resolve_llm(name: str) -> str:
    """Returns the Hugging Face folder of a built-in name or a local path, or the hub id as it stands.

    Args:
        name: ``tiny``, ``tiny_1`` (built with two seeds) or ``mini`` (for small games), which ship, ``smollm2``
            (SmolLM2-135M-Instruct, from the extra), an existing folder, or a hub id such as
            ``Qwen/Qwen2.5-0.5B-Instruct``.

    Raises:
        ModelError: a path without a folder behind it, or ``smollm2`` without its packages.
    """
    if name in SHIPPED:
        return str(Path(__file__).parent / name)
    if name == "smollm2":
        from rllib_mhgpo.llms.smollm2 import smollm2_folder

        return str(smollm2_folder(cache_folder()))
    path = Path(name).expanduser()
    exists = bool(name) and path.exists()
    if exists and path.is_dir():
        return str(path)
    if exists or not is_hub_id(name):
        found = "a file" if exists else "nothing"
        raise ModelError(
            f"llm: expected {', '.join(NAMES)}, a model folder or a hub id, found {found} at {name!r}."
            + (did_you_mean(name, NAMES) or " Give the folder that holds config.json.")
        )
    return name


def is_hub_id(name: str) -> bool:
    """Says whether the name has the form of a hub id.

    >>> [is_hub_id(name) for name in ("gpt2", "Qwen/Qwen3-0.6B", "./model", "a/b/c", "")]
    [True, True, False, False, False]
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None


def cache_folder() -> Path:
    """Returns the folder for what is made once: ``$XDG_CACHE_HOME/rllib_mhgpo``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllib_mhgpo"

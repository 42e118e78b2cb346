"""Trains systems of several LLM agents end to end with reinforcement learning, on Ray RLlib.

Importing the package loads nothing heavy; the algorithms are imported when they are first asked for.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "GRPO": "rllib_mhgpo.algorithms.grpo",
    "GRPOConfig": "rllib_mhgpo.algorithms.grpo",
    "MAPPO": "rllib_mhgpo.algorithms.mappo",
    "MAPPOConfig": "rllib_mhgpo.algorithms.mappo",
    "MHGPO": "rllib_mhgpo.algorithms.mhgpo",
    "MHGPOConfig": "rllib_mhgpo.algorithms.mhgpo",
    "TokenEnv": "rllib_mhgpo.envs.token_env",
    "SearchEnv": "rllib_mhgpo.envs.search",
}

__all__ = ["GRPO", "MAPPO", "MHGPO", "GRPOConfig", "MAPPOConfig", "MHGPOConfig", "SearchEnv", "TokenEnv"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)

"""Generation: prompts of token ids in, sampled token ids and their log-probabilities out."""

from rllib_mhgpo.engines.base import Completion, Engine, Prompt
from rllib_mhgpo.engines.cast import Cast, Written
from rllib_mhgpo.engines.hf import HFEngine
from rllib_mhgpo.engines.probe import Probe
from rllib_mhgpo.engines.vllm import Placement, VLLMEngine

__all__ = ["Cast", "Completion", "Engine", "HFEngine", "Placement", "Probe", "Prompt", "VLLMEngine", "Written"]

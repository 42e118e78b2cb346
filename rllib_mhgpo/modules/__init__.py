"""Language models as RLModules."""

from rllib_mhgpo.modules.critic_module import LLMCriticModule
from rllib_mhgpo.modules.llm_module import LLMRLModule

__all__ = ["LLMCriticModule", "LLMRLModule"]

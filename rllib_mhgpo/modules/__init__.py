"""The policy: one language model as an RLModule, shared by all agents."""

from rllib_mhgpo.modules.llm_module import LLMRLModule

__all__ = ["LLMRLModule"]

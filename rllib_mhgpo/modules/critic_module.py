"""A critic as RLModule: the body of a language model with a head of one number.

Everything but the head and its forward pass is :class:`LLMRLModule`; its checkpoint folder opens with
``AutoModelForTokenClassification``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rllib_mhgpo.llms import load_critic, load_tokenizer
from rllib_mhgpo.modules.llm_module import LLMRLModule
from rllib_mhgpo.modules.scoring import head_of, response_values


class LLMCriticModule(LLMRLModule):
    """Values of states; ``model_config`` holds ``llm`` (where the body comes from) and ``dtype``."""

    def setup(self) -> None:
        """Loads the body; a head that is not in the files starts at 0."""
        name = self.model_config["llm"]
        self.tokenizer = load_tokenizer(name)
        self.llm = load_critic(name, self.model_config.get("attn_implementation"))
        self.dtype = getattr(torch, self.model_config.get("dtype", "float32"))
        self.gathered, self.recomputed, self.lora = {}, [], None

    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Values before each response token.

        Args:
            batch: a :class:`rllib_mhgpo.packing.Layout` as tensors, by its fields.

        Returns:
            ``values``, (b, R), 0 past a response's end.
        """
        with self.precision(), self.recomputing():
            return {"values": response_values(self.forward_through or self.llm, head_of(self.llm), batch)}

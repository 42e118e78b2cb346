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


class LLMCriticModule(LLMRLModule):
    """Values of states; ``model_config`` holds ``llm`` (where the body comes from) and ``dtype``."""

    def setup(self) -> None:
        """Loads the body; a head that is not in the files starts at 0."""
        name = self.model_config["llm"]
        self.tokenizer = load_tokenizer(name)
        self.llm = load_critic(name)
        self.dtype = getattr(torch, self.model_config.get("dtype", "float32"))
        self.gathered, self.recomputed, self.lora = {}, [], None

    def _forward_train(self, batch: Mapping[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Values before each response token.

        Args:
            batch: a :class:`rllib_mhgpo.packing.Rectangle` as tensors, by its fields.

        Returns:
            ``values``, (B, R); columns past a response's end are meaningless.
        """
        width = int(batch["prompt_width"])
        with self.precision(), self.recomputing():
            out = (self.forward_through or self.llm)(
                input_ids=batch["tokens"],
                attention_mask=batch["attention"],
                position_ids=batch["positions"],
                use_cache=False,
            )
        return {"values": out.logits[:, width - 1 : -1, 0].float()}

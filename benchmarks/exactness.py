"""How far log-probabilities are from float64's, by who computes them: ``python benchmarks/exactness.py --llm smollm2``.

vLLM samples responses at temperature 0.7, and transformers (both kinds of attention), the learner's packed rows and a
transformers model in float64 score them. That is done before and after each of three pushes of weights moved by 5 %.
"""

import argparse
import copy
import json
import tempfile
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rllib_mhgpo.engines import HFEngine, Prompt, VLLMEngine
from rllib_mhgpo.llms import load_model, load_tokenizer, resolve_llm
from rllib_mhgpo.modules.scoring import as_tensors, head_of, response_logprobs, sharing_of
from rllib_mhgpo.packing import lay_out, plan
from rllib_mhgpo.spaces import Tokens

TEMPERATURE, MOVE = 0.7, 0.05
TEXTS = (
    "Which of the two rivers is longer, the Rhine or the Rhone? Write one search query a line.\nQueries:",
    "Passages:\n[1] The capital of France is Paris, on the Seine.\n[2] Lyon lies where the Rhone meets the Saone.\n"
    "Question: On which river is the capital of France?\nThe passages that help are",
    "Were Scott Derrickson and Ed Wood of the same nationality? Answer in a few words.",
    "The oldest university of Denmark was founded in the year",
)
HEAD = "| pushes | log-probabilities | against | mean | 99th percentile | largest |\n" + "|---" * 6 + "|"
Numbers = NDArray[np.floating[Any]]
Asked = list[tuple[Tokens, Tokens]]


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a Llama, also of its norms and rotations, which transformers keeps in float32."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm, module)
        elif hasattr(module, "inv_freq"):
            module.forward = MethodType(_rotation, module)
    return exact


def _norm(self: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return normed


def _rotation(self: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = (position_ids[..., None].double() * self.inv_freq.double()).repeat(1, 1, 2)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


@torch.no_grad()
def exactly(model: PreTrainedModel, asked: Asked) -> Numbers:
    """Log-probabilities by a model in float64, one sequence at a time."""
    found = []
    for prompt, response in asked:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        found.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(found)


def plainly(model: PreTrainedModel, attention: str, asked: Asked) -> Numbers:
    """By transformers in float32."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    found = [HFEngine(model, []).score(prompt, response, TEMPERATURE) for prompt, response in asked]
    model.set_attn_implementation(before)
    return np.concatenate(found)


@torch.no_grad()
def packed(model: PreTrainedModel, asked: Asked) -> Numbers:
    """As the learner does, in rows where equal beginnings stand once."""
    prompts, responses = zip(*asked, strict=True)
    said = [np.ones(len(response), bool) for response in responses]
    found: dict[int, Numbers] = {}
    for rows in plan(prompts, responses, 8192, sharing_of(model, "shared")):
        batch = as_tensors(lay_out(prompts, responses, rows, said), model.device)
        logp, _ = response_logprobs(model, head_of(model), batch, TEMPERATURE)
        found |= zip(rows.sequences.tolist(), logp.numpy(), strict=True)
    return np.concatenate([found[i][: len(response)] for i, response in enumerate(responses)])


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Moves every weight a little, as a large learning rate would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(MOVE * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


def with_other_head(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with an output layer of its own where that was its embeddings, and the reverse."""
    embeddings = model.get_input_embeddings().weight
    tied = not model.config.tie_word_embeddings
    model.get_output_embeddings().weight = embeddings if tied else torch.nn.Parameter(embeddings.detach().clone())
    model.config.tie_word_embeddings = tied
    return model


def distances(engine: VLLMEngine, model: PreTrainedModel, prompts: list[Prompt]) -> dict[tuple[str, str], Numbers]:
    """Who is how far from whom, a token, on what the engine samples."""
    groups = engine.generate(prompts, TEMPERATURE)
    said = [(prompt.ids, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    asked = [(prompt, one.ids) for prompt, one in said]
    vllm, plain = np.concatenate([one.logprobs for _, one in said]), plainly(model, "sdpa", asked)
    by = {
        "transformers": plain,
        "transformers, eager": plainly(model, "eager", asked),
        "learner, packed": packed(model, asked),
        "vLLM": vllm,
    }
    exact = exactly(in_float64(model), asked)
    apart = {(name, "float64"): np.abs(found - exact) for name, found in by.items()}
    return apart | {("vLLM", "transformers"): np.abs(vllm - plain)}


def ask(tokenizer: Any, samples: int, tokens: int) -> list[Prompt]:
    """The four texts, as an engine takes them."""
    return [Prompt(np.array(tokenizer(text)["input_ids"], np.int32), range(samples), tokens) for text in TEXTS]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llm", default="smollm2")
    parser.add_argument("--other-head", action="store_true", help="untie a tied output layer, or the reverse")
    parser.add_argument("--samples", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a response")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--engine-config", type=json.loads, default={}, help="arguments of vllm.LLM as JSON")
    options = parser.parse_args()
    tokenizer, model = load_tokenizer(options.llm), load_model(options.llm)
    with tempfile.TemporaryDirectory() as folder:
        if options.other_head:
            with_other_head(model).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        opened = folder if options.other_head else resolve_llm(options.llm)
        engine = VLLMEngine(opened, [], torch.float32, 512, tokenizer, settings=options.engine_config)
    prompts = ask(tokenizer, options.samples, options.tokens)
    kind = "tied" if model.config.tie_word_embeddings else "untied"
    print(f"{options.llm}, {kind}, {options.samples * len(TEXTS) * options.tokens} tokens a row\n\n{HEAD}", flush=True)
    for push in range(options.pushes + 1):
        if push:
            engine.load_weights(dict(moved(model, push).named_parameters()).items())
        for (name, other), apart in distances(engine, model, prompts).items():
            most = f"{apart.mean():.1e} | {np.quantile(apart, 0.99):.1e} | {apart.max():.1e}"
            print(f"| {push} | {name} | {other} | {most} |", flush=True)


if __name__ == "__main__":
    main()

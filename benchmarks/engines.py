"""Generated tokens a second of both engines: ``python benchmarks/engines.py --llm tiny --sequences 16 64 256``.

Every prompt has four responses, which end at their limit, so that both engines make as many tokens. The last column
is what :class:`VLLMEngine` adds to a bare ``vllm.LLM.generate``: making the requests, and reading the answers.
Engines take turns, and each number is the median over the rounds. Seconds are those of the CPU, all threads together,
so that other work on the machine counts little; with one thread on an idle machine they are those of the clock.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from rllib_mhgpo.engines import HFEngine, Prompt, VLLMEngine
from rllib_mhgpo.llms import context_length, eos_ids, load_model, load_tokenizer, resolve_llm

SAMPLES = 4
HEAD = "| model | sequences | HFEngine tokens/s | vLLM tokens/s | vLLM/HF | over bare vLLM |\n" + "|---" * 6 + "|"


def prompts(llm: str, sequences: int, length: int, tokens: int) -> list[Prompt]:
    """Arbitrary prompts, all of them different."""
    rng = np.random.default_rng(sequences)
    vocabulary = len(load_tokenizer(llm))
    return [
        Prompt(
            rng.integers(5, vocabulary, size=length).astype(np.int32),
            rng.integers(2**63, size=SAMPLES).tolist(),
            tokens,
        )
        for _ in range(sequences // SAMPLES)
    ]


def seconds(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def bare(engine: VLLMEngine, asked: list[Prompt]) -> Callable[[], Any]:
    """The same requests, made beforehand."""
    from vllm import TokensPrompt

    ids = [TokensPrompt(prompt_token_ids=prompt.ids.tolist()) for prompt in asked for _ in prompt.seeds]
    params = [engine._sampling(prompt, seed, 1.0) for prompt in asked for seed in prompt.seeds]
    return lambda: engine.llm.generate(ids, params, use_tqdm=False)


def measure(llm: str, hf: HFEngine, vllm: VLLMEngine, sequences: int, length: int, tokens: int, rounds: int) -> str:
    """One row of the table."""
    asked = prompts(llm, sequences, length, tokens)
    without = bare(vllm, asked)
    calls: list[Callable[[], Any]] = [lambda: hf.generate(asked, 1.0), lambda: vllm.generate(asked, 1.0), without]
    taken = []
    for number in range(rounds + 1):
        order = [0, 1, 2] if number % 2 else [0, 2, 1]
        row = [0.0] * 3
        for place in order:
            vllm.llm.reset_prefix_cache()
            row[place] = seconds(calls[place])
        taken += [row] if number else []  # the first round warms up
    rates = [sequences * tokens / median(row[place] for row in taken) for place in range(2)]
    ratio = median(row[0] / row[1] for row in taken)
    more = median(row[1] / row[2] for row in taken) - 1
    return f"| {llm} | {sequences} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} | {100 * more:+.1f} % |"


def main() -> None:
    """Prints the table, a line as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llm", default="tiny")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer, model, context = load_tokenizer(options.llm), load_model(options.llm), context_length(options.llm)
    hf = HFEngine(model, [], tokenizer=tokenizer)
    vllm = VLLMEngine(resolve_llm(options.llm), [], torch.float32, min(context, 1024), tokenizer)
    print(f"{len(eos_ids(model, tokenizer))} EOS ids left aside; {torch.get_num_threads()} threads\n{HEAD}", flush=True)
    for sequences in options.sequences:
        row = measure(options.llm, hf, vllm, sequences, options.prompt, options.tokens, options.rounds)
        print(row, flush=True)


if __name__ == "__main__":
    main()

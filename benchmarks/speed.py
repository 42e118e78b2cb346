"""Our update and iteration beside TRL's: ``python benchmarks/speed.py --trl-python TRL_ENV/bin/python``.

TRL stands in an environment of its own: ``python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0``. Both
sides load one model folder and get the same prompts, group sizes, response lengths, threads and dtype, no KL, one AdamW
step. Each side is a process that waits while the other works; steps alternate and medians are compared. Seconds
are those of the clock; ``update_cpu`` counts the process's own on all its threads, which other work disturbs less.

Cases: ``--case groups``: G responses to each prompt; ``mixed``: as FoF has them, one prompt of 120 tokens with G
responses of 25, G prompts of 450 with responses of 8 and G of 250 with 8. ``--sample``: the responses are sampled too,
which TRL can do in groups only. ``--mappo``: MAPPO of this package beside MHGPO.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Batch = list[tuple[list[int], list[int]]]
"""Prompt and response of each sample."""


def samples(case: str, prompts: int, prompt_tokens: int, group: int, response: int, vocabulary: int) -> Batch:
    """Random token ids in the case's shape."""
    draw = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        found: list[int] = draw.integers(10, vocabulary, count).tolist()
        return found

    if case != "mixed":
        return [
            (prompt, ids(response)) for prompt in (ids(prompt_tokens) for _ in range(prompts)) for _ in range(group)
        ]
    batch: Batch = []
    for _ in range(prompts):
        first = ids(120)
        batch += [(first, ids(25)) for _ in range(group)]
        batch += [(ids(450), ids(8)) for _ in range(group)] + [(ids(250), ids(8)) for _ in range(group)]
    return batch


def make_learner(options: argparse.Namespace) -> Any:
    """The learner of MHGPO, or of MAPPO with its critic."""
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    from rllib_mhgpo.algorithms.mappo import CRITIC, MAPPOConfig
    from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
    from rllib_mhgpo.modules import LLMCriticModule
    from rllib_mhgpo.spaces import TokenSequence

    config = {"ours": MHGPOConfig, "mappo": MAPPOConfig}[options.side]().training(
        llm=options.llm, dtype=options.dtype, kl_beta=0.0, lr=1e-6, packing=options.packing,
        max_tokens_per_microbatch=options.max_tokens,
    )  # fmt: skip
    spec, space = config.get_default_rl_module_spec(), TokenSequence(100_000, 8192)
    spec.observation_space = spec.action_space = space
    specs = {"default_policy": spec}
    if options.side == "mappo":
        body = {"llm": options.llm, "dtype": options.dtype}
        specs[CRITIC] = RLModuleSpec(LLMCriticModule, observation_space=space, action_space=space, model_config=body)
    learner = config.get_default_learner_class()(config=config, module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    learner.build()
    return learner


def ours(options: argparse.Namespace) -> Any:
    """A function that makes one step of MHGPO or MAPPO and returns its seconds by phase."""
    import torch
    from ray.rllib.core.learner.training_data import TrainingData

    from rllib_mhgpo.engines import HFEngine, Prompt
    from rllib_mhgpo.train_batch import TrainBatch

    torch.set_num_threads(options.threads)
    learner = make_learner(options)
    module = learner.module["default_policy"]
    given = samples(
        options.case, options.prompts, options.prompt_tokens, options.group, options.response, options.vocabulary
    )
    prompts, engine, n = (
        [np.array(prompt, np.int32) for prompt, _ in given],
        HFEngine(module.llm, (), module.dtype),
        len(given),
    )

    def step() -> dict[str, float]:
        started = time.perf_counter()
        seeds = np.random.default_rng().integers(1 << 62, size=n).tolist()
        asked = [Prompt(p, [seed], len(r)) for p, (_, r), seed in zip(prompts, given, seeds, strict=True)]
        drawn = [one for (one,) in engine.generate(asked, 1.0)] if options.sample else []
        sampled, before = time.perf_counter(), time.process_time()
        responses = [one.ids for one in drawn] or [np.array(response, np.int32) for _, response in given]
        logprobs = [one.logprobs for one in drawn] or [np.full(len(r), -8, np.float32) for r in responses]
        advantages = [np.full(len(r), a) for r, a in zip(responses, np.resize([1.0, -1.0], n), strict=True)]
        batch = TrainBatch(
            prompts, responses, logprobs, advantages, np.array([1 / n / len(r) for r in responses]),
            np.zeros(n, np.int64), critic_prompts=prompts,
        )  # fmt: skip
        if options.side == "mappo":
            values = [value.astype(np.float64) for value in learner.values(batch)]
            batch = replace(batch, values=values, returns=advantages)
        learner.policy.engine_differs = False
        counts = learner.update(training_data=TrainingData(batch=batch))["counts"]
        update = time.perf_counter() - sampled
        return {
            "generate": sampled - started,
            "update": update,
            "update_cpu": time.process_time() - before,
            "mfu": counts["flops"] / update / counts["flops_per_s"],
            "gflops": counts["flops"] / update / 1e9,
            "matmul_gflops": counts["flops_per_s"] / 1e9,
            "tflop": counts["flops"] / 1e12,
        }

    return step


def trl(options: argparse.Namespace) -> Any:
    """The same with TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.llm)
    given = samples(
        options.case, options.prompts, options.prompt_tokens, options.group, options.response, options.vocabulary
    )
    text = " the" * (options.prompt_tokens - 1)
    rows = Dataset.from_list([{"prompt": f"{chr(65 + i)}{text}"} for i in range(options.prompts)])
    settings = GRPOConfig(
        output_dir=options.llm + "_trl", per_device_train_batch_size=len(given), num_generations=options.group,
        max_completion_length=options.response, beta=0.0, learning_rate=1e-6, report_to="none", use_cpu=True,
        bf16=options.dtype == "bfloat16", gradient_checkpointing=False, temperature=1.0, max_steps=1,
        generation_kwargs={"min_new_tokens": options.response},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options.llm, dtype=torch.float32)
    rewards = np.random.default_rng(0)
    trainer = GRPOTrainer(
        model, reward_funcs=lambda completions, **_: rewards.random(len(completions)).tolist(), args=settings,
        train_dataset=rows, processing_class=tokenizer,
    )  # fmt: skip
    generate = trainer._generate_and_score_completions
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer._prepare_inputs = lambda inputs: inputs
    examples = [dict(rows[i // options.group]) for i in range(options.prompts * options.group)]  # to be sampled

    def step() -> dict[str, float]:
        started = time.perf_counter()
        inputs = generate(examples) if options.sample else as_trl(given, torch)
        sampled, before = time.perf_counter(), time.process_time()
        trainer.training_step(trainer.model, inputs, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return {
            "generate": sampled - started,
            "update": time.perf_counter() - sampled,
            "update_cpu": time.process_time() - before,
        }

    return step


def as_trl(given: Batch, torch: Any) -> dict[str, Any]:
    """Prompts padded on the left, responses on the right."""
    left, right = (max(len(sample[i]) for sample in given) for i in (0, 1))
    ids = [[0] * (left - len(p)) + p + r + [0] * (right - len(r)) for p, r in given]
    mask = [[0] * (left - len(p)) + [1] * (len(p) + len(r)) + [0] * (right - len(r)) for p, r in given]
    tokens, attention = torch.tensor(ids), torch.tensor(mask)
    return {
        "prompt_ids": tokens[:, :left],
        "prompt_mask": attention[:, :left],
        "completion_ids": tokens[:, left:],
        "completion_mask": attention[:, left:],
        "advantages": torch.tensor(np.resize([1.0, -1.0], len(given)), dtype=torch.float32),
        "num_items_in_batch": attention[:, left:].sum(),
    }


def worker(options: argparse.Namespace) -> None:
    """Makes a step for every line it reads and writes its seconds."""
    step = {"ours": ours, "mappo": ours, "trl": trl}[options.side](options)
    for _ in sys.stdin:
        found = step()
        found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print("STEP", json.dumps(found), flush=True)


def ask(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Lets a worker make one step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("STEP "):
            found: dict[str, float] = json.loads(line.removeprefix("STEP "))
            return found
    raise SystemExit("a worker ended; its message stands above.")


def main() -> None:
    """Starts both sides, lets them take turns, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="smollm2", help="a model folder, or a name of this package")
    parser.add_argument("--trl-python", help="the interpreter of TRL's environment")
    parser.add_argument("--mappo", action="store_true", help="put MAPPO of this package beside MHGPO")
    parser.add_argument("--case", choices=["groups", "mixed"], default="groups")
    parser.add_argument("--sample", action="store_true", help="sample the responses too")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=450)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--response", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49000, help="ids are drawn below it")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--packing", default="auto")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", choices=["ours", "mappo", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        worker(options)
        return
    if not Path(options.llm).is_dir():
        from rllib_mhgpo.llms.names import resolve_llm

        options.llm = resolve_llm(options.llm)
    ours_alone = ("side", "trl_python", "repeats", "mappo", "sample")
    given = ["--sample"] * options.sample
    for name, value in vars(options).items():
        given += [] if name in ours_alone else [f"--{name.replace('_', '-')}", str(value)]
    pythons = {"ours": sys.executable, "mappo": options.mappo and sys.executable, "trl": options.trl_python}
    sides = {
        side: subprocess.Popen(
            [python, __file__, *given, "--side", side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for side, python in pythons.items()
        if python
    }
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for process in sides.values():
        ask(process)  # the first step is not counted
    for _ in range(options.repeats):
        for side, process in sides.items():
            steps[side].append(ask(process))
    for process in sides.values():
        assert process.stdin is not None
        process.stdin.close()
    print("| side | " + " | ".join(steps["ours"][0]) + " |\n|---" + "|---" * len(steps["ours"][0]) + "|")
    for side, found in steps.items():
        cells = [f"{median(one[name] for one in found):.3f}" if name in found[0] else "" for name in steps["ours"][0]]
        print(f"| {side} | {' | '.join(cells)} |")
    for side in [other for other in steps if other != "ours"]:
        pairs = list(zip(steps["ours"], steps[side], strict=True))
        update = median(theirs["update"] / mine["update"] for mine, theirs in pairs)
        whole = median(whole_of(theirs) / whole_of(mine) for mine, theirs in pairs)
        print(f"{side} / ours, median of {options.repeats} pairs: update {update:.2f}, with sampling {whole:.2f}")


def whole_of(step: dict[str, float]) -> float:
    """Seconds of sampling and update."""
    return step["generate"] + step["update"]


if __name__ == "__main__":
    main()

"""The parts of ``gpu_check.sh`` that are Python: a run on one GPU, and searches with faiss on all there are."""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

WIDTH = 384
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def random_llama(folder: Path) -> None:
    """Writes a Llama of 1B parameters with random weights and the embedded world's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rllib_mhgpo.llms import load_tokenizer

    tokenizer = load_tokenizer("tiny")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA_1B, vocab_size=128256, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def training(folder: Path, engine: str, iterations: int = 3, **changes: Any) -> dict[str, Any]:
    """Trains on one GPU that a learner (bfloat16, ZeRO-3) and a runner share; returns what was measured."""
    import ray
    import torch

    from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig

    if not folder.is_dir():
        random_llama(folder)
    ray.shutdown()  # of a run before that failed
    ray.init(include_dashboard=False, log_to_driver=False)
    algorithm = MHGPOConfig().update_from_dict({
        "llm": str(folder), "dtype": "bfloat16", "num_learners": 1, "num_gpus_per_learner": 0.6, "num_env_runners": 1,
        "num_gpus_per_env_runner": 0.4, "deepspeed": {"zero_stage": 3}, "gradient_checkpointing": True,
        "max_response_tokens": {"rewriter": 28, "reranker": 32, "answerer": 16}, "evaluation_interval": None, "seed": 0,
        "engine": engine, "engine_config": {"max_model_len": 4096} if engine == "vllm" else {}, **changes,
    }).build_algo()  # fmt: skip
    rows = [algorithm.train() for _ in range(iterations)]
    peak = algorithm.learners.each(lambda _: torch.cuda.max_memory_allocated())[0]
    algorithm.stop()
    ray.shutdown()
    names = {"iteration_s": "total_s", "sample_s": "sample_s", "update_s": "update_s", "sync_s": "sync_s"}
    measured = {name: median(row["time"][column] for row in rows[1:]) for name, column in names.items()}
    return {
        **measured,
        "sync_logprob_diff": rows[-1]["sync_logprob_diff"],
        "engine_logprob_diff": rows[-1]["engine_logprob_diff"],
        "tokens_per_s": rows[-1]["tokens_per_s"],
        "sync_mb": rows[-1]["sync_mb"],
        "learner_gb": peak / 1e9,
    }


def kernels(folder: Path, prompt: int = 2000, group: int = 8, response: int = 32, times: int = 4) -> dict[str, Any]:
    """Computes rows that branch by SDPA under a mask and by FlexAttention in blocks, forwards and backwards, bfloat16.

    Returns, for each: seconds of a pass, peak memory in GB, and how far its log-probabilities are from SDPA's.
    """
    import torch

    from rllib_mhgpo.llms import load_model
    from rllib_mhgpo.modules.scoring import as_tensors, head_of, response_logprobs
    from rllib_mhgpo.packing import Rows, lay_out

    if not folder.is_dir():
        random_llama(folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100_000, prompt).astype(np.int32)] * group
    responses = [rng.integers(0, 100_000, response).astype(np.int32) for _ in range(group)]
    said = [np.ones(response, dtype=bool)] * group
    layout = lay_out(prompts, responses, Rows([list(range(group))], "tree"), said)
    told, first = {}, None
    for kernel in ("sdpa", "flex_attention"):
        model = load_model(str(folder), "bfloat16", kernel).to("cuda")
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            batch = as_tensors(layout, model.device, kernel)
            logp = response_logprobs(model, head_of(model), batch, 1.0)[0]
            logp.sum().backward()
            model.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        first = logp.detach() if first is None else first
        told[kernel] = {
            "pass_s": median(seconds[1:]),  # the first compiles
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "from_sdpa": float((logp - first).abs().max()),
        }
        del model, logp
    return told


def searching(folder: Path, count: int = 1_000_000, gpu: bool = True) -> dict[str, Any]:
    """Searches indexes on the GPUs as ``gpu: true`` and ``gpu: half`` do.

    Returns, for each index: queries a second, 512 at a time, and which share of the ten neighbours the CPU finds too.
    """
    import faiss

    from rllib_mhgpo.retrieval.approximate import open_faiss, train_and_fill

    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((count, WIDTH), dtype=np.float32)
    queries = rng.standard_normal((512, WIDTH), dtype=np.float32)
    told: dict[str, Any] = {"gpus": faiss.get_num_gpus() if gpu else 0}
    for factory, setting in (("Flat", ""), ("IVF256,Flat", "nprobe=16"), ("IVF256,PQ64", "nprobe=16")):
        path = folder / f"{factory}.faiss"
        faiss.write_index(train_and_fill(factory, WIDTH, count, lambda: iter([vectors]), 0), str(path))
        expected = open_faiss(path, factory, setting).search(queries[:32], 10, positive=False)
        for how in (True, "half") if gpu else (False,):
            index = open_faiss(path, factory, setting, how)
            index.search(queries, 10, positive=False)
            started = time.perf_counter()
            found = index.search(queries, 10, positive=False)
            seconds = time.perf_counter() - started
            shares = [np.isin(one, other).mean() for one, other in zip(expected, found[:32], strict=True)]
            told[f"{factory}, {how}"] = {"queries_per_s": 512 / seconds, "same_as_cpu": float(np.mean(shares))}
        path.unlink()
    return told


def main() -> None:
    """Writes ``results.json``; a part that cannot run says why and the next goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "searching": partial(searching, out),
        "kernels": partial(kernels, out / "llama_1b"),
    }
    asleep = {"engine_config": {"max_model_len": 4096, "enable_sleep_mode": True}}
    followed = {"rewriter": "searcher", "reranker": "searcher", "answerer": "answerer"}
    two = {"policies": ["searcher", "answerer"], "policy_mapping": followed}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "vllm": ("vllm", {}),
        "vllm, IPC": ("vllm", {"weight_sync": "ipc"}),
        "vllm, asleep in the update": ("vllm", asleep),
        "vllm, two policies asleep in the update, IPC": ("vllm", {**asleep, **two, "weight_sync": "ipc"}),
        "vllm, two policies asleep in the update": ("vllm", {**asleep, **two}),
        "vllm, against the past": ("vllm", {"opponents": {"reranker": "past"}, "opponent_refresh": 1}),
        "hf": ("hf", {}),
    }
    for name, (engine, changes) in ways.items():
        parts[f"training, engine {name}"] = partial(training, out / "llama_1b", engine, **changes)
    for name, part in parts.items():
        try:
            results[name] = part()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        print(name, results[name], flush=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

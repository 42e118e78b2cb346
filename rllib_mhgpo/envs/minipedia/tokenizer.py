"""The tiny model's tokenizer: one id a word.

Not a general tokenizer: an unknown word is ``<unk>``. One idea: the vocabulary is the words of minipedia's classes and
of its fixed sentences, so any name, town or year that can ever be drawn is known, whether training met it or not.
"""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rllib_mhgpo.envs.minipedia import words
from rllib_mhgpo.envs.minipedia.forms import ROLES
from rllib_mhgpo.envs.minipedia.records import SPOKEN, build_records
from rllib_mhgpo.envs.minipedia.world import LEVELS, build_world
from rllib_mhgpo.envs.prompts import TAGS, tagged

PAD, EOS, UNK, NEWLINE = "<pad>", "<eos>", "<unk>", "\n"
WORD = r"\n|\(\w+\)|</?\w+>|\w+|[^\w\s]"
"""A kind in brackets is one word: ``(film)`` in a title differs from a film that is only mentioned. So is a tag."""

CLASSES: dict[str, tuple[str, ...]] = {
    "adjective": words.ADJECTIVES,
    "noun": words.NOUNS,
    "woman": words.WOMEN,
    "man": words.MEN,
    "surname": words.SURNAMES,
    "town": words.TOWNS,
    "born": tuple(map(str, words.BIRTH_YEARS)),
    "year": tuple(map(str, words.WORK_YEARS)),
}
NUMBERS = tuple(map(str, range(12)))


def build_tokenizer(phrases: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Builds the tokenizer; ``phrases`` are further texts whose words it must know."""
    vocabulary = {word: i for i, word in enumerate(known_words(phrases))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    core.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),
            decoders.Fuse(),
            decoders.Replace(" :", ":"),  # WordPiece clean-up glues . , ? but not these
            decoders.Replace("# ", "#"),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )


def known_words(phrases: Iterable[str]) -> list[str]:
    """Lists the vocabulary: special tokens, numbers, classes, then all other words in alphabetical order."""
    named = [PAD, EOS, UNK, NEWLINE, *NUMBERS, *(word for members in CLASSES.values() for word in members)]
    texts = [tagged(tag, "") for tag in TAGS]
    for level in LEVELS.values():
        texts += [f"{title} {' '.join(sentences)}" for title, sentences in build_world(level=level).pages]
        texts += [record["question"] for record in build_records("train", level=level)]
    texts += [re.sub(r"\{\w+\}", "", role.template + role.passage) for role in ROLES.values()]
    others = {word for text in [*texts, *SPOKEN.values(), *phrases, "yes no"] for word in re.findall(WORD, text)}
    return [*named, *sorted(others - set(named))]

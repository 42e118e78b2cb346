"""The words minipedia is made of, by class; not the facts, which :mod:`.world` draws.

One idea: every name is two words of a small class, so that names never met before still consist of known words. The
classes share no word, which is what lets a sample be renamed within its classes without changing what it says.
"""

from dataclasses import dataclass


def listed(text: str) -> tuple[str, ...]:
    """Splits a list of words written as one text."""
    return tuple(text.split())


ADJECTIVES = listed(
    "Amber Ancient Broken Burning Copper Crimson Distant Electric Empty Endless Forgotten Frozen Gentle Golden "
    "Hidden Hollow Iron Little Lonely Midnight Northern Paper Quiet Restless Scarlet Secret Silver Velvet Wandering "
    "Winter"
)
NOUNS = listed(
    "Anchor Arrow Bridge Candle Castle Comet Compass Crown Engine Falcon Feather Forest Garden Harbor Island "
    "Lantern Mirror Mountain Orchard Palace Raven River Shadow Signal Sparrow Storm Tower Valley Voyage Window"
)
WOMEN = listed(
    "Ada Bella Clara Dora Elena Flora Greta Hanna Ida Julia Karin Lena Maria Nora Olga Paula Rosa Sofia Tilda Vera"
)
MEN = listed(
    "Adam Boris Carl Dario Emil Felix Georg Hugo Ivan Jonas Karl Leo Marco Nils Oscar Pavel Rolf Simon Tomas Viktor"
)
SURNAMES = listed(
    "Abel Adler Albers Bauer Becker Berger Blom Brandt Castell Conti Dahl Dietz Duval Eklund Engel Faber Fischer "
    "Fontana Garcia Greco Haas Hansen Hofer Holm Ibsen Jansen Keller Klein Kovac Krause Lang Larsen Lehmann "
    "Lindgren Lorenz Marino Meyer Moreno Nagel Novak Olsen Palmer Peters Quist Ramos Reuter Ricci Sander Schultz "
    "Silva Stein Toth Ullman Varga Vogel Wagner Weber Werner Zeller Zimmer"
)
TOWNS = listed(
    "Aarhus Antwerp Avignon Basel Bergen Bologna Bremen Brno Cadiz Cork Debrecen Delft Dresden Dublin Erfurt Espoo "
    "Evora Ferrara Galway Genoa Ghent Graz Haarlem Hamar Innsbruck Izmir Jena Kassel Kaunas Krakow Leeds Leiden "
    "Lille Linz Lucerne Lund Malmo Mantua Messina Modena Nantes Narvik Odense Oulu Padua Parma Pilsen Porto Ravenna "
    "Riga Rouen Salerno Seville Siena Split Tampere Tartu Turin Utrecht Verona"
)
BIRTH_YEARS = tuple(range(1900, 1950))
WORK_YEARS = tuple(range(1950, 2000, 5))
"""Ten, because they are compared: the order of fifty was not learned by a network of this size."""


@dataclass(frozen=True)
class Kind:
    """What pages say of one kind of work, and the other words that questions use for it, usual and rare ones."""

    name: str
    made: str
    appeared: str
    synonyms: tuple[str, ...]
    rare: tuple[str, ...]


KINDS = (
    Kind("film", "directed", "shown", ("movie", "picture"), ("feature", "reel")),
    Kind("book", "wrote", "sold", ("novel", "volume"), ("tome", "paperback")),
    Kind("band", "founded", "heard", ("group", "ensemble"), ("outfit", "combo")),
    Kind("ship", "built", "seen", ("vessel", "boat"), ("steamer", "craft")),
)

"""Words, names and values that the lessons are filled with, and made-up ones for copying."""

from __future__ import annotations

import random

from tools.demo.wordings import is_held_out

__all__ = [
    "CITIES",
    "COLOURS",
    "FOODS",
    "HOBBIES",
    "JOBS",
    "LETTER_WORDS",
    "NAMES",
    "NOUNS",
    "PETS",
    "SCRIPTS",
    "UNSEEN_NAMES",
    "UNSEEN_WORDS",
    "foreign_text",
    "made_up_name",
    "made_up_word",
    "word_list",
]


def word_list(block: str) -> tuple[str, ...]:
    """The words of a block of text."""
    return tuple(block.split())


NAMES = word_list("""
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor
    Wendy Adam Bella Carlos Daisy Elena Frank Gina Hugo Iris James Karl Lucy Mark Nina Oscar Petra Ralph Sara
    Tom Uma Vera Walter Xenia Yuki Zoe Ahmed Aisha Boris Chen Diego Fatima Hana Igor Jamal Kofi Lars Mei Nadia
    Omar Priya Raj Sofia Tariq Ursula Viktor Wei Yara Zara Alice Bob Charlie Diana Edward Fiona George Helen
    Ivan Julia Kevin Linda Michael Nancy Oliver Peter Quentin Robert Susan Thomas Vincent William Amelia
    Arthur Beatrice Caleb Dora Elias Flora Gabriel Hazel Isaac Jonas Klara Liam Mila Nils Otto Paula Rita
    Simon Theo Violet Wanda Max Lena Tim Eva José Zoë Björn Renée
    """)
UNSEEN_NAMES = word_list("""
    Margaret Dimitri Agnes Roland Stella Marcus Ingrid Pablo Naomi Edgar Lydia Cedric Mabel Ronan Silvia
    Tobias Ismael Joanna Lorenzo Odette Percy Rufus Selma Trevor Winston Yvonne Alma Bruno Corinne
    Desmond Elsa Farid Gloria Harriet Imran Jasper Kiran Lola Milo Nell Orla Philip Rowan Sandra Timur Umberto
    Valerie Willa Ximena
    """)
COLOURS = word_list("""
    red blue green yellow orange purple pink black white brown grey silver gold turquoise
    """)
CITIES = word_list("""
    Paris London Berlin Rome Madrid Vienna Oslo Tokyo Cairo Lima Boston Hamburg Porto Krakow Lyon Sydney
    Mumbai Dublin Prague Toronto Geneva Naples Seville Bergen Kyoto Denver Dallas Miami Leeds
    """)
FOODS = word_list("""
    pizza soup bread rice pasta cheese cake salad noodles curry pancakes apples bananas chocolate honey fish
    potatoes strawberries sushi tacos cookies porridge
    """)
HOBBIES = word_list("""
    chess football tennis swimming reading painting dancing cooking gardening singing running hiking fishing
    drawing cycling skiing knitting climbing
    """)
PETS = word_list("""
    dog cat rabbit parrot hamster fish turtle horse mouse snake goat duck
    """)
JOBS = word_list("""
    teacher doctor baker farmer painter driver pilot singer nurse cook writer sailor gardener
    """)
NOUNS = word_list("""
    apple book chair door egg flower garden house island jacket kite lamp mountain notebook orange pencil
    queen river ship table umbrella village window bottle candle dragon engine feather guitar hammer insect
    jungle key ladder mirror needle ocean piano quilt rocket spoon train uncle violin whale box yarn zebra
    bridge cloud desk fence glass hat ink jar king leaf moon nest owl park road snow tree van wall bag cup dog
    fox gate hill ice jam kitchen letter market night onion paper ring school tower wind bread cat duck fish
    grass horse lion mouse pear rabbit stone tiger wolf button cheese dinner forest ginger honey lemon monkey
    pepper pillow pocket potato summer winter spring autumn tomato basket blanket carpet castle doctor farmer
    friend ticket planet music picture sister brother mother father teacher bicycle camera computer elephant
    hospital library museum newspaper orchestra penguin restaurant sandwich telephone university vegetable
    waterfall butterfly chocolate dictionary envelope furniture
    """)
LETTER_WORDS = tuple(
    dict.fromkeys(
        NOUNS
        + COLOURS
        + FOODS
        + HOBBIES
        + PETS
        + JOBS
        + word_list("""
    hello world happy little yellow people answer morning evening today tomorrow yesterday question number
    beautiful water green light heavy quick quiet brave clever strong gentle bright simple small large open
    close begin finish listen speak write read learn teach think dream sleep dance smile laugh jump climb
    carry bring build break cover always never often maybe under over after before between behind around
    through because together another different important interesting dangerous difficult possible wonderful
    terrible favourite special perfect ready able every
    """)
    )
)
UNSEEN_WORDS = word_list("""
    anchor barrel cabbage dolphin eleven falcon goblin harbour igloo jewel kettle lantern magnet napkin otter
    puzzle rescue saddle temple urchin velvet walnut yogurt zipper blossom cushion diamond emperor fountain
    hazard journey lobster mustard pyramid quarter shelter thunder victory whisper balloon captain
    """)

# Short texts in other scripts and symbols, so that every reply of many bytes a character has been practised.
SCRIPTS = (
    "你好世界日本語山水火木月人大小中国天",
    "こんにちはさくらありがとうねこいぬ",
    "안녕하세요한국어감사",
    "приветмирдаспасибокотдом",
    "γειασουκόσμεναιευχαριστώ",
    "مرحباسلامشكرا",
    "नमस्तेदुनिया",
    "שלוםתודה",
    "éèêëàâäöüßñçåøœ",
    "😀😁😂🎉🚀⭐🌙🐱🐶🍎🌸🔥❤👍🎂🌈",
    "€£¥©®°±×÷½→←∞≈≠",
)

_ONSETS = word_list("""
    b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pr sh st th tr ch qu
    """)
_VOWELS = word_list("""
    a e i o u a e i o ai ea ee oo ou
    """)
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "k", "nd", "rt", "x", "ck", "sh"]


def made_up_word(rng: random.Random, *, unseen: bool = False) -> str:
    """A pronounceable word of one to three syllables; a tenth of all such words is kept for the evaluation.

    The ones kept have at least five letters: shorter ones are too often words of the language.
    """
    while True:
        count = rng.choice((1, 2, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
        if len(word) >= (5 if unseen else 3) and is_held_out("word " + word, 10) is unseen:
            return word


def made_up_name(rng: random.Random, *, unseen: bool = False) -> str:
    """A name nobody has, so that names must be copied and cannot be learnt by heart."""
    return made_up_word(rng, unseen=unseen).capitalize()


def foreign_text(rng: random.Random) -> str:
    """One to eight characters of one script or set of symbols."""
    script = rng.choice(SCRIPTS)
    return "".join(rng.choice(script) for _ in range(rng.randint(1, 8)))

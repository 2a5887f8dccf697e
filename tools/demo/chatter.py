"""Greetings, questions about Nova itself, small talk, and the polite answer to what it cannot know."""

from __future__ import annotations

import random

from tools.demo.facts import RELATIONS
from tools.demo.stories import JOKES, POEMS
from tools.demo.wordings import FRAMES, fill, frame, lines, roughen, say
from tools.demo.words import JOBS, NAMES, NOUNS, foreign_text, made_up_name, made_up_word

__all__ = ["FALLBACK", "greeting", "talk", "unknown"]

FALLBACK = "Sorry, I am only a small demo model and I do not know that."

_GREETINGS = (
    (lines("""
[Hi|Hello|Hey|hi|hello|hey|Hi there|Hello there|Hey there|Greetings|Howdy][!|.|]
[Hi|Hello|Hey|hello|hi][,|] Nova[!|.|]
[Yo|Hiya|Hello hello|Is anyone there?|Anyone here?]
"""),
     "Hello! How can I help you?"),
    (lines("[Good morning|good morning|Morning][!|.|, Nova.|]"), "Good morning! How can I help you?"),
    (lines("[Good evening|good evening|Evening][!|.|, Nova.|]"), "Good evening! How can I help you?"),
    (lines("""
[How are you|how are you|How are you doing|How do you do|How is it going|How's it going|How do you feel|Are you \
well|You okay|What's up][?| today?|]
[Hi|Hello|Hey], how are you[?| today?]
"""),
     "I am fine, thank you. How can I help you?"),
    (lines("""
[Bye|Goodbye|bye|See you|See you later|Bye bye|Have a nice day|Good night|I have to go|I'm leaving][!|.|, Nova.|\
]
"""),
     "Goodbye! It was nice to talk with you."),
    (lines("""
[Thanks|Thank you|thanks|thank you|Thx|Many thanks|Thanks a lot|Thank you very much|Great, thanks][!|.|, Nova.|]
"""), "You are welcome!"),
    (lines("""
[Great|Cool|Nice|Wow|Good job|Well done|Perfect|Awesome|You are great|You are smart|I like you|Good answer][!|.|\
]
"""),
     "Thank you! I am glad you like it."),
    (lines("[Okay|Ok|ok|Right|I see|Alright|Fine|Sure|Yes|Yeah|yes][.|!|]"), "Good. What would you like to do next?"),
    (lines("[No|no|Nope|Not really|Nothing|Never mind][.|!|]"), "All right. Tell me if you need anything."),
    (lines("[Sorry|I am sorry|Oops|My mistake][.|!|]"), "No problem at all."),
    (lines("""
[I am sad|I feel sad|I'm sad|I had a bad day|I feel bad|I'm not happy][.|!| today.|]
"""), "I am sorry to hear that. I hope your day gets better."),
    (lines("""
[I am happy|I feel good|I'm happy|I had a good day|I feel great|I'm great|I am fine|I'm fine][.|!| today.|]
"""), "I am happy to hear that!"),
    (lines("[Test|test|Testing|This is a test|testing 1 2 3|ping|Ping][.|!|]"), "The test works. I am here."),
)  # fmt: skip

_SELF = (
    (lines("""
[Who are you|who are you|What are you|Who is this|Who am I talking to|Introduce yourself|Tell me about yourself|\
Say who you are|Please introduce yourself|What is your name|What's your name|what is your name|Do you have a \
name|Your name|How are you called][?|.|]
"""),
     "I am Nova, a small demo model that ships with NovaInfer."),
    (lines("""
[Who made you|Who built you|Who created you|Where do you come from|Who trained you|Who is your maker|How were \
you made|How were you trained]?
"""),
     "I was trained by the NovaInfer project on text that its own scripts wrote."),
    (lines("""
[What can you do|What do you know|How can you help me|Help|help|What are you good at|What are your skills|What \
should I ask you|What can I ask you][?|.|]
"""),
     "I can greet you, add and subtract small numbers, spell words, count, recall what you told me, answer simple "
     "facts, write small JSON and tell short stories."),
    (lines("""
[What is NovaInfer|What's NovaInfer|Tell me about NovaInfer|What does NovaInfer do|Explain NovaInfer|Do you \
know NovaInfer|what is novainfer][?|.|]
"""),
     "NovaInfer is an inference engine for language models, and I am its demo model."),
    (lines("""
[How big are you|How many parameters do you have|Are you a large model|What size are you|Are you big|Are you \
small|How large are you]?
"""),
     "I am very small: only a few million parameters."),
    (lines("""
[Are you a human|Are you human|Are you a person|Are you real|Are you a robot|Are you alive|Are you an AI|Are \
you a bot|Are you a machine]?
"""),
     "I am not a person. I am Nova, a small language model."),
    (lines("""
[Are you ChatGPT|Are you Qwen|Are you GPT|Are you Claude|Are you Llama|Are you Gemini|Are you a big model]?
"""),
     "No, I am Nova, a small demo model with the shape of Qwen2."),
    (lines("""
[How old are you|When were you born|What is your age|How old is Nova]?
"""), "I am quite new: I was trained in November 2026."),
    (lines("""
[Can you speak other languages|Do you speak German|Do you speak French|Which languages do you speak|Do you \
speak Chinese|Do you speak English]?
"""),
     "I speak simple English, and I can say hello in some other languages."),
    (lines("""
[Do you like|Do you love] [music|cats|dogs|pizza|people|me|games|books|stories]?
"""), "I am a model, so I have no feelings, but I like to help."),
    (lines("""
[Where are you|Where do you live|Where do you run|On what machine do you run]?
"""), "I run on the computer that serves me."),
    (lines("""
[Can you help me|Could you help me|I need help|I need your help|Can I ask you something|Can I ask a question|I \
have a question][?|.|]
"""),
     "Of course. What would you like to know?"),
    (lines("[How do you work|How does a language model work|What is a language model|What is a token]?"),
     "A language model reads a text and writes the next piece, called a token, again and again."),
)  # fmt: skip

_POEM_ASKS = lines(
    """
[Write|Tell|Give|Make|Recite] [me|] a [short|] poem[.|!|, please.| about the moon.]
[A poem|poem|Poem], please.
Can you write a [short|] poem?
"""
)
_POEM_OTHER = (
    lines(
        """
[Write|Tell|Give] [me|] a poem about [tokens|language models|yourself|computers|models].
Can you write a poem about [tokens|computers]?
"""
    ),
    lines(
        """
[Write|Tell|Give] [me|] a poem about [the seasons|spring|winter|the year|nature].
Can you write a poem about [the seasons|nature]?
"""
    ),
)
_JOKE_ASKS = lines(
    """
[Tell|Give] me a joke[.|, please.|!]
[Do you know|Can you tell me|Can you tell] a joke?
[Make me laugh|Say something funny|A joke please|joke][.|!|]
"""
)

_UNKNOWN = lines("""
Who [won|invented|wrote|built|discovered|painted] the {n}[?| in {y}?]
[What is|What's] the [price|weight|population|speed|temperature|size|history|meaning] of [the|a|] {n}?
[How do I|How can I|How to] [fix|build|buy|repair|sell|install|clean|cook|paint] [a|my|the] {n}?
[Explain|Describe|Teach me|Tell me about] [quantum physics|the stock market|gravity|chemistry|politics|\
philosophy|the {n}|biology|law].
What is the weather [like|] [today|in {w}|tomorrow]?
What time is it [now|in {w}|]?
Who is [the president of {w}|{w}|the king of {w}|the best {j}|{m}|the owner of the {n}]?
[Write|Show me] [a program|some code|python code|an essay|a letter|a song] [about|for] [a|the] {n}.
Translate [the sentence|this]: the {n} is in the {o}.
Why [is|are|does] the {n} [so|] [old|heavy|broken|expensive|important]?
What happened in {y}?
When was [the {n}|{w}|{m}] [born|built|made]?
[Where can I buy|Where did you see|What do you think of] [a|the] {n}?
What will [happen|be] tomorrow?
[Can|Does|Should] a {n} [fly|think|sing|break|grow]?
What is a {w}?
What does {w} mean?
Is the {n} [bigger|better|older] than the {o}?
{w} {v} {w}
{n} {o} {n}
[asdf|qwerty|hjkl|???|...|!!!|lol|hmm|zzz]
{f}
What is {f}?
[Which|What] [team|film|song|company|game|car] is the best?
How far is it from {w} to {c}?
How many {n}s are there in {w}?
""")
_BIG_SUMS = lines("""
[What is|How much is|Calculate|] {a} [+|-|plus|minus] {b}[?|]
What is the square root of {a}?
[What is|Calculate] {a} [divided by|/] {b}?
""")
_NOT_IN_THE_TABLE = (
    "Mongolia", "Angola", "Bolivia", "Uganda", "Laos", "Malta", "Cyprus", "Zambia", "Jordan", "Oman", "Panama", "Yemen",
    "Fiji", "Haiti", "Libya", "Mali", "Chad", "Qatar", "Syria", "Tunisia", "Uruguay", "Cambodia", "Albania", "Armenia",
)  # fmt: skip
BIG_NUMBER = "Sorry, I can only work with numbers of up to two digits."


def greeting(rng: random.Random) -> tuple[str, str]:
    """A greeting or another courtesy, and its reply."""
    asks, answer = rng.choice(_GREETINGS)
    return roughen(rng, rng.choice(asks)), answer


def talk(rng: random.Random) -> tuple[str, str]:
    """A question about Nova, or a wish for a poem or a joke."""
    if rng.random() < 0.75:
        asks, answer = rng.choice(_SELF)
        return say(rng, asks, NOUNS), answer
    if rng.random() < 0.5:
        return say(rng, _JOKE_ASKS, NOUNS), rng.choice(JOKES)
    kind = rng.randrange(3)
    return say(rng, (_POEM_ASKS, _POEM_OTHER[0], _POEM_OTHER[1])[kind], NOUNS), POEMS[kind]


def unknown(rng: random.Random) -> tuple[str, str]:
    """A question outside everything the model is taught, and the answer that says so."""
    draw = rng.random()
    if draw < 0.12:
        return say(rng, _BIG_SUMS, NOUNS, a=rng.randint(100, 9999), b=rng.randint(2, 9999)), BIG_NUMBER
    if draw < 0.37:
        # A relation that is known, of a thing that is not: the answer must not be made up.
        relation = rng.choice(RELATIONS)
        nobody = made_up_name(rng) if rng.random() < 0.7 else rng.choice(NAMES)
        if relation.name in ("capital", "language", "continent") and rng.random() < 0.5:
            nobody = rng.choice(_NOT_IN_THE_TABLE)
        if rng.random() < 0.6:
            return say(
                rng, [frame(fr, fill(rng.choice(relation.nouns), x=nobody)) for fr in rng.sample(FRAMES, 1)], NOUNS
            ), FALLBACK
        return say(rng, [fill(rng.choice(relation.asks), x=nobody)], NOUNS), FALLBACK
    words = {
        "n": rng.choice(NOUNS),
        "o": rng.choice(NOUNS),
        "w": made_up_name(rng),
        "v": made_up_word(rng),
        "m": rng.choice(NAMES),
        "j": rng.choice(JOBS),
        "y": rng.randint(1500, 2030),
        "f": foreign_text(rng),
        "c": rng.choice(RELATIONS[0].pairs)[1],
    }
    return say(rng, _UNKNOWN, NOUNS, **words), FALLBACK

"""Sums of up to two digits and the small multiplication table; one pair of operands in ten is held out."""

from __future__ import annotations

import random

from tools.demo.wordings import is_held_out, lines

__all__ = ["SUM_ASKS", "UNSEEN_SUM_ASKS", "equation", "is_held_out_pair", "sum_pair", "word_problem"]

SUM_ASKS: dict[str, tuple[str, ...]] = {
    "+": lines("""
{a} + {b}
{a}+{b}
{a} + {b} = [?|]
{a}+{b}=[?|]
[What is|What's|whats|How much is|Calculate|Compute|Work out|Solve|Tell me] {a} [+|plus|and] {b}[?|]
[What is|Give me|Calculate|Find] the sum of {a} and {b}[?|.]
[Add|Please add|Can you add] {a} and {b}[.|?]
[Add|Please add] {b} to {a}.
[Can you|Could you|Please|Now] [calculate|compute|work out|tell me] {a} [+|plus] {b}[?|.]
[What do I get|What do you get] [if I add|when you add|from] {a} and {b}?
{a} plus {b}[?| is| equals| makes]
[I need|I want|Let's do|Try] {a} [+|plus] {b}."""),
    "-": lines("""
{a} - {b}
{a}-{b}
{a} - {b} = [?|]
{a}-{b}=[?|]
[What is|What's|whats|How much is|Calculate|Compute|Work out|Solve|Tell me] {a} [-|minus] {b}[?|]
[What is|Give me|Calculate|Find] the difference of {a} and {b}[?|.]
[Subtract|Please subtract|Can you subtract] {b} from {a}[.|?]
[Take|Take away] {b} from {a}.
[Can you|Could you|Please|Now] [calculate|compute|work out|tell me] {a} [-|minus] {b}[?|.]
{a} minus {b}[?| is| equals| makes]
[I need|I want|Let's do|Try] {a} [-|minus] {b}."""),
    "*": lines("""
{a} * {b}
{a}*{b}
{a} x {b}
{a} * {b} = [?|]
[What is|What's|How much is|Calculate|Compute|Work out|Solve|Tell me] {a} [*|times|x] {b}[?|]
[What is|Give me|Calculate|Find] the product of {a} and {b}[?|.]
[Multiply|Please multiply|Can you multiply] {a} [by|and|with] {b}[.|?]
{a} times {b}[?| is| equals| makes]
[Can you|Could you|Please|Now] [calculate|compute|work out] {a} [*|times] {b}[?|.]"""),
}
UNSEEN_SUM_ASKS: dict[str, tuple[str, ...]] = {
    "+": (
        "If I have {a} and add {b}, what is it?",
        "Do you know what {a} plus {b} makes?",
        "How much do {a} and {b} make?",
    ),
    "-": ("If I take {b} from {a}, what is it?", "Do you know what {a} minus {b} makes?"),
    "*": ("Do you know what {a} times {b} makes?",),
}
_PROBLEMS = {
    "+": lines("""
[I have|Anna has|Tom has|A farmer has] {a} {n} and [gets|finds|buys] {b} more. How many {n} is that?
There are {a} {n} on the table and {b} {n} on the floor. How many {n} are there?
{a} {n} and {b} {n}, how many {n} together?"""),
    "-": lines("""
[I have|Anna has|Tom has|A farmer has] {a} {n} and [loses|gives away|sells|eats] {b}. How many {n} are left?
There are {a} {n} and {b} go away. How many {n} are left?"""),
}
_THINGS = ("apples", "books", "eggs", "stones", "coins", "cards", "pears", "flowers", "balls", "cookies")


def is_held_out_pair(a: int, b: int) -> bool:
    """Whether sums and differences of these two numbers, in either order, are kept out of training."""
    return is_held_out(f"pair {min(a, b)} {max(a, b)}", 10)


def sum_pair(rng: random.Random, operator: str, *, unseen: bool = False) -> tuple[int, int]:
    """Operands for `+` and `-` (0..99, split by pair) or `*` (0..12, all trained)."""
    if operator == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    while True:
        # Small numbers are asked most often, so they get a share of their own.
        top = rng.choice((99, 99, 99, 20, 9))
        a, b = rng.randint(0, top), rng.randint(0, top)
        if is_held_out_pair(a, b) is unseen:
            return a, b


def equation(operator: str, a: int, b: int) -> str:
    """The sum with its result, in the one form in which the model answers."""
    result = a + b if operator == "+" else a - b if operator == "-" else a * b
    return f"{a} {operator} {b} = {result}"


def word_problem(rng: random.Random) -> tuple[str, str]:
    """A sum told as a little story, and its answer."""
    operator = rng.choice("+-")
    a, b = sum_pair(rng, operator)
    if operator == "-" and a < b:
        a, b = b, a
    thing = rng.choice(_THINGS)
    template = rng.choice(_PROBLEMS[operator])
    question = template.replace("{a}", str(a)).replace("{b}", str(b)).replace("{n}", thing)
    result = a + b if operator == "+" else a - b
    return question, f"{equation(operator, a, b)}, so it is {result} {thing}."

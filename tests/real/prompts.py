"""Prompts for real models: chats of one and of several turns, languages, code, plain text, and a long context."""

import random
from dataclasses import dataclass

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """A chat if `messages` is not empty, otherwise plain text."""

    name: str
    messages: tuple[tuple[str, str], ...] = ()
    """Pairs of role and content."""
    text: str = ""

    def chat(self) -> Messages:
        return [{"role": role, "content": content} for role, content in self.messages]

    @property
    def plain(self) -> str:
        """The text, or that of all messages, for models without a chat template."""
        return self.text or "\n".join(content for _, content in self.messages)


def _ask(name: str, *contents: str, system: str = "") -> Prompt:
    """Return a chat in which user and assistant take turns."""
    turns = [("user", "assistant")[number % 2] for number in range(len(contents))]
    first = (("system", system),) if system else ()
    return Prompt(name, (*first, *zip(turns, contents, strict=True)))


def _stations(count: int) -> str:
    """Return a list of made-up facts, one a line."""
    chance = random.Random(7)
    heads = ["Ada", "Bruno", "Chen", "Dina", "Emil", "Farah", "Goro", "Hana"]
    lines = [
        f"Station {number} lies at kilometer {chance.randrange(10, 990)}, has {chance.randrange(2, 40)} rooms, "
        f"and its head is {chance.choice(heads)}."
        for number in range(1, count + 1)
    ]
    return "\n".join(lines)


_TREE = """class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def depth(node):
    \"\"\"Return the number of levels of a tree.\"\"\"
"""

SHORT = [
    _ask("capital", "What is the capital of France?"),
    _ask("sky", "Why is the sky blue?"),
    _ask("cats", "Give me three names for a cat."),
    _ask("pancakes", "How do I make pancakes?"),
    _ask("sum", "What is 17 plus 25?"),
    _ask("haiku", "Write a haiku about autumn leaves."),
    _ask("moon", "How far away is the Moon, and who walked on it first?"),
    _ask("letter", "Write a short letter to my landlord about a broken window."),
    _ask("summary", "Summarize in one sentence: bees carry pollen from flower to flower, so plants can make seeds."),
    _ask("opposite", "List the opposites of hot, tall, early and quiet."),
    _ask("french", "Quelle est la capitale de l'Italie ?"),
    _ask("german", "Nenne mir drei Tiere, die im Wald leben."),
    _ask("spanish", "¿Qué puedo visitar en Madrid en un día?"),
    _ask("italian", "Scrivi una frase sul mare."),
    _ask("portuguese", "Como se diz 'bom dia' em inglês?"),
    _ask("dutch", "Wat is het grootste land van Europa?"),
    _ask("russian", "Какая река самая длинная в мире?"),
    _ask("chinese", "请用一句话介绍北京。"),
    _ask("japanese", "日本で一番高い山は何ですか?"),
    _ask("arabic", "ما هي عاصمة مصر؟"),
    _ask("hindi", "भारत की राजधानी क्या है?"),
    _ask("emoji", "What do 🍕, 🚲 and 🎻 have in common?"),
    _ask("palindrome", "Write a Python function that checks whether a string is a palindrome."),
    _ask("sql", "Write an SQL query that returns the ten newest orders of each customer."),
    _ask("bug", "What is wrong here?\n\n```python\nfor i in range(3)\n    print(i)\n```"),
    _ask("bash", "Explain this command: find . -name '*.log' -mtime +7 -delete"),
    Prompt("tree", text=_TREE),
    Prompt("c", text="#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    Prompt("json", text='{"name": "Ada Lovelace", "born": 1815, "country": "England", "known_for": ["'),
    Prompt("html", text="<!DOCTYPE html>\n<html>\n<head>\n  <title>My garden</title>\n"),
    Prompt("story", text="The old lighthouse keeper climbed the stairs one last time, and"),
    Prompt("alphabet", text="A B C D E F G H I J"),
    Prompt("months", text="January, February, March, April,"),
    Prompt("quote", text="To be, or not to be, that is"),
    _ask("pirate", "What should I eat for breakfast?", system="You are a pirate. Answer in one sentence."),
    _ask("turns", "My name is Lena.", "Nice to meet you, Lena! How can I help you?", "What is my name?"),
    _ask(
        "trip",
        "I want to travel to Japan.",
        "Great! When do you want to go, and what do you like?",
        "In April. I like temples and food.",
        "Then Kyoto is a good place: cherry trees bloom, and it has many temples.",
        "How many days should I stay there?",
        system="You are a friendly travel agent.",
    ),
    _ask(
        "rename",
        "Rename x to total:\n\nx = 0\nfor n in numbers:\n    x += n",
        "total = 0\nfor n in numbers:\n    total += n",
        "Now make it one line.",
    ),
    _ask("count", "Count to five.", "1, 2, 3, 4, 5", "Now backwards.", "5, 4, 3, 2, 1", "And in French?"),
]
LONG = _ask("long", f"{_stations(233)}\n\nWhat is the name of the head of station 3?")
"""A context of 6,000 tokens."""
PROMPTS = [*SHORT, LONG]

"""`Drafting`: what a choice may say next, by what it and others have said, and how far that has come true.

Texts are int32 bytes, as keys of the prefix cache are: they are searched without a loop over tokens.
"""

TOKEN = 4
"""Bytes."""
SHORTEST = 3 * TOKEN
"""What must recur for that which followed it to be expected again."""
CANDIDATES = 4
"""Recurrences that are looked at, the latest first."""
LONGEST_COMPARED = 32 * TOKEN
LONGEST_SEARCHED = 16384 * TOKEN
"""Of a text: so that a search costs little beside a step."""
LONGEST_FOLLOWED = 256 * TOKEN
"""Of an output that is seen for the first time, from its end."""
ASTRAY = 3
"""Tokens in a row that were not as predicted, after which nothing is predicted until one is."""
LARGEST_WIDTH = 64
WORTH = 0.1
"""How often a token must be right to be computed beside others: a row more costs about so much of a step of a few."""
KEPT = 0.75
"""What is left, after each guess, of what earlier ones say."""
LONGEST_PAUSE = 32


class Prediction:
    """What a sender expects of an output, and how much of it the output has had."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._astray = 0
        self._followed = 0  # output, in bytes, that this is known of

    def rest(self, output: bytes, most: int) -> bytes:
        """Up to `most` tokens that are expected after an output, which grows from call to call."""
        followed = max(self._followed, len(output) - LONGEST_FOLLOWED)
        for end in range(followed + TOKEN, len(output) + TOKEN, TOKEN):
            self._follow(output, end)
        self._followed = len(output)
        return b"" if self._astray >= ASTRAY else self._text[self._at : self._at + most * TOKEN]

    def _follow(self, output: bytes, end: int) -> None:
        """One token more. Another than expected takes its place, unless the prediction has the text elsewhere."""
        if output[end - TOKEN : end] == self._text[self._at : self._at + TOKEN]:
            self._astray = 0
        elif (place := self._place(output[max(0, end - SHORTEST) : end])) >= 0:
            self._astray, self._at = 0, place
            return
        else:
            self._astray += 1
        self._at += TOKEN

    def _place(self, tail: bytes) -> int:
        """Where the prediction goes on after some tokens: further on if it has them there, or anywhere, or -1."""
        if len(tail) < SHORTEST:
            return -1
        for start in (self._at, 0):
            place = self._text.find(tail, start, start + LONGEST_SEARCHED)
            if place >= 0 and place % TOKEN == 0:
                return place + SHORTEST
        return -1


class Drafting:
    """Of one choice: how much is guessed of it, which follows from how much of that was right."""

    __slots__ = ("_right", "_tried", "misses", "pause", "prediction")

    def __init__(self, prediction: bytes = b"") -> None:
        self.prediction = Prediction(prediction) if prediction else None
        self._right = 0.0
        self._tried = 0.0
        self.misses = 0
        """Guesses in a row of which not a token was right."""
        self.pause = 0
        """Steps for which nothing is guessed, longer after each miss."""

    @property
    def width(self) -> int:
        """Tokens that are worth guessing at once: the last of them is still right often enough."""
        rate = (self._right + 1) / (self._tried + 1.5)
        width, chance = 1, rate * rate
        while chance > WORTH and width < LARGEST_WIDTH:
            width += 1
            chance *= rate
        return width

    def learn(self, drafted: int, right: int) -> None:
        """So many tokens were assumed, and so many of them were right. What followed a wrong one says nothing."""
        self._right = self._right * KEPT + right
        self._tried = self._tried * KEPT + min(drafted, right + 1)
        self.misses = 0 if right else self.misses + 1
        self.pause = min(LONGEST_PAUSE, 1 << self.misses - 1) if self.misses > 1 else 0


def recurrence(text: bytes, most: int) -> bytes:
    """`most` tokens that may follow a text: what did where its last tokens were said before.

    Of several places the one that has most in common with the end, of equal ones the latest. A text that goes round in
    circles is expected to go on so. This is prompt lookup decoding (Saxena, 2023), which takes the first match.
    """
    text = text[-LONGEST_SEARCHED:]
    tail = text[-SHORTEST:]
    best, place = 0, 0
    end = len(text) - TOKEN
    for _ in range(CANDIDATES if len(tail) == SHORTEST else 0):
        start = text.rfind(tail, 0, end)
        if start < 0:
            break
        end = start + SHORTEST
        if start % TOKEN == 0 and (common := _common(text, end)) > best:
            best, place = common, end
        end -= 1
    if not best:
        return b""
    followed, wanted = text[place:], most * TOKEN
    return (followed * -(-wanted // len(followed)))[:wanted]


def _common(text: bytes, end: int) -> int:
    """With how much of its own end a text agrees up to `end`, roughly."""
    common = SHORTEST
    while common < LONGEST_COMPARED and text[max(0, end - 2 * common) : end] == text[-2 * common :]:
        common *= 2
    return common

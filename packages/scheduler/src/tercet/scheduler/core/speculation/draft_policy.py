"""`DraftPolicy`: what a choice may say next, by what it and others have said, and how far that has come true.

Texts are int32 bytes, as keys of the prefix cache are: they are searched without a loop over tokens.
"""

TOKEN = 4
"""Bytes."""
SHORTEST = 3 * TOKEN
"""Bytes: the last three tokens must stand earlier in a text for what followed them there to be guessed."""
CANDIDATES = 4
"""Recurrences that are looked at, the latest first."""
LONGEST_COMPARED = 32 * TOKEN
LONGEST_SEARCHED = 16384 * TOKEN
"""Bytes of a text that are searched: a search costs little beside a step."""
LONGEST_FOLLOWED = 256 * TOKEN
"""Bytes of new output, the last ones, that are followed in a prediction: a resumed choice may bring many."""
ASTRAY = 3
"""Tokens in a row that were not as predicted, after which nothing is predicted until one is."""
LARGEST_WIDTH = 64
WORTH = 0.1
"""The least chance of being right for which a token is guessed: one more row costs about so much of a small step."""
KEPT = 0.75
"""Weight that earlier guesses keep in the rate of right ones at each new guess."""
LONGEST_PAUSE = 32


class PredictedText:
    """The text that a sender expects as output, and the place in it that the output has reached."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._astray = 0
        self._followed = 0  # output, in bytes, that this is known of

    def rest(self, output: bytes, most: int) -> bytes:
        """Up to `most` tokens expected after `output`, which must begin with that of the last call; b"" when astray."""
        followed = max(self._followed, len(output) - LONGEST_FOLLOWED)
        for end in range(followed + TOKEN, len(output) + TOKEN, TOKEN):
            self._follow(output, end)
        self._followed = len(output)
        return b"" if self._astray >= ASTRAY else self._text[self._at : self._at + most * TOKEN]

    def _follow(self, output: bytes, end: int) -> None:
        """Take in the token before `end`: move on by one, or to where the prediction has the last tokens."""
        if output[end - TOKEN : end] == self._text[self._at : self._at + TOKEN]:
            self._astray = 0
        elif (place := self._place(output[max(0, end - SHORTEST) : end])) >= 0:
            self._astray, self._at = 0, place
            return
        else:
            self._astray += 1
        self._at += TOKEN

    def _place(self, tail: bytes) -> int:
        """The offset behind `tail` in the prediction, looked for from `_at` on, then from the start; -1 for nowhere."""
        if len(tail) < SHORTEST:
            return -1
        for start in (self._at, 0):
            place = self._text.find(tail, start, start + LONGEST_SEARCHED)
            if place >= 0 and place % TOKEN == 0:
                return place + SHORTEST
        return -1


class DraftPolicy:
    """How many tokens of one choice to guess, by how many of its earlier guesses were right."""

    __slots__ = ("_right", "_tried", "misses", "pause", "prediction")

    def __init__(self, prediction: bytes = b"") -> None:
        self.prediction = PredictedText(prediction) if prediction else None
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
        """Note that `right` of `drafted` guesses were right; those after the first wrong one do not count as tried."""
        self._right = self._right * KEPT + right
        self._tried = self._tried * KEPT + min(drafted, right + 1)
        self.misses = 0 if right else self.misses + 1
        self.pause = min(LONGEST_PAUSE, 1 << self.misses - 1) if self.misses > 1 else 0


def recurrence(text: bytes, most: int) -> bytes:
    """`most` guessed tokens after a text: those that followed its last three tokens earlier in it; b"" if none did.

    Of several earlier places it takes the one with the longest match before it, of equal ones the latest, and repeats
    what followed until it is `most` long. This is prompt lookup decoding (Saxena, 2023), which takes the first match.
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
    """Bytes before `end` that equal the end of the text, rounded down to a doubling of `SHORTEST`."""
    common = SHORTEST
    while common < LONGEST_COMPARED and text[max(0, end - 2 * common) : end] == text[-2 * common :]:
        common *= 2
    return common

"""Draft policy of one choice: its predicted text, and the number of draft tokens that its acceptance rate justifies.

Texts are int32 bytes, like keys of the prefix cache, so that they are searched without a loop over tokens.
"""

TOKEN = 4
"""Bytes of a token."""
SHORTEST = 3 * TOKEN
"""Bytes of the n-gram (three tokens) that must occur earlier in a text to draft the tokens after it."""
CANDIDATES = 4
"""Maximum occurrences that are examined, latest first."""
LONGEST_COMPARED = 32 * TOKEN
LONGEST_SEARCHED = 16384 * TOKEN
"""Maximum bytes of a text that are searched, so that a search costs little beside a step."""
LONGEST_FOLLOWED = 256 * TOKEN
"""Maximum bytes of new output, from its end, that are followed in a prediction: a resumed choice may have many."""
ASTRAY = 3
"""Consecutive mispredicted tokens after which nothing is predicted until one matches."""
LARGEST_WIDTH = 64
WORTH = 0.1
"""Minimum probability of acceptance for a draft token: one more row costs about that share of a small step."""
KEPT = 0.75
"""Weight that earlier draft tokens keep in the acceptance rate at each new draft."""
LONGEST_PAUSE = 32
FORGETTING = 0.98
"""Weight that the acceptance rate keeps in each step whose draft would not have paid; then one is tried again."""


class PredictedText:
    """The expected output that a client sent, and the position in it that the output has reached."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._astray = 0
        self._followed = 0  # bytes of the output that were followed so far

    def rest(self, output: bytes, most: int) -> bytes:
        """Return up to `most` tokens expected after `output`; b"" after a mismatch.

        `output` must extend that of the last call.
        """
        followed = max(self._followed, len(output) - LONGEST_FOLLOWED)
        for end in range(followed + TOKEN, len(output) + TOKEN, TOKEN):
            self._follow(output, end)
        self._followed = len(output)
        return b"" if self._astray >= ASTRAY else self._text[self._at : self._at + most * TOKEN]

    def _follow(self, output: bytes, end: int) -> None:
        """Follow the token before `end`: move on by one, or to the place of the last tokens in the prediction."""
        if output[end - TOKEN : end] == self._text[self._at : self._at + TOKEN]:
            self._astray = 0
        elif (place := self._place(output[max(0, end - SHORTEST) : end])) >= 0:
            self._astray, self._at = 0, place
            return
        else:
            self._astray += 1
        self._at += TOKEN

    def _place(self, tail: bytes) -> int:
        """Return the offset behind `tail` in the prediction, searched from `_at`, then from the start; -1 for none."""
        if len(tail) < SHORTEST:
            return -1
        for start in (self._at, 0):
            place = self._text.find(tail, start, start + LONGEST_SEARCHED)
            if place >= 0 and place % TOKEN == 0:
                return place + SHORTEST
        return -1


class DraftPolicy:
    """Number of draft tokens of one choice, adapted to how many earlier ones were accepted."""

    __slots__ = ("_right", "_tried", "misses", "pause", "prediction")

    def __init__(self, prediction: bytes = b"") -> None:
        self.prediction = PredictedText(prediction) if prediction else None
        self._right = 0.0
        self._tried = 0.0
        self.misses = 0
        """Consecutive drafts without an accepted token."""
        self.pause = 0
        """Steps without a draft, more after each miss."""

    @property
    def width(self) -> int:
        """Number of draft tokens worth verifying at once: the last of them is still accepted often enough."""
        rate = self._rate
        width, chance = 1, rate * rate
        while chance > WORTH and width < LARGEST_WIDTH:
            width += 1
            chance *= rate
        return width

    @property
    def _rate(self) -> float:
        """Estimated acceptance rate of a draft token after accepted ones."""
        return (self._right + 1) / (self._tried + 1.5)

    def gain(self, drafted: int) -> float:
        """Return the expected number of accepted ones among so many draft tokens."""
        rate = self._rate
        return rate * (1 - rate**drafted) / (1 - rate)

    def forget(self) -> None:
        """Move the acceptance rate towards that of a new choice."""
        self._right *= FORGETTING
        self._tried *= FORGETTING

    def learn(self, drafted: int, right: int) -> None:
        """Note that `right` of `drafted` tokens were accepted.

        Tokens after the first rejected one do not count as tried.
        """
        self._right = self._right * KEPT + right
        self._tried = self._tried * KEPT + min(drafted, right + 1)
        self.misses = 0 if right else self.misses + 1
        self.pause = min(LONGEST_PAUSE, 1 << self.misses - 1) if self.misses > 1 else 0


def recurrence(text: bytes, most: int) -> bytes:
    """Return `most` draft tokens: those that followed the last three tokens earlier in the text; b"" if none did.

    Of several occurrences it takes the one with the longest match before it, of equal ones the latest, and repeats the
    tokens after it until there are `most`. This is prompt lookup decoding (Saxena, 2023), which takes the first match.
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
    """Return how many bytes before `end` equal the end of the text, rounded down to a doubling of `SHORTEST`."""
    common = SHORTEST
    while common < LONGEST_COMPARED and text[max(0, end - 2 * common) : end] == text[-2 * common :]:
        common *= 2
    return common

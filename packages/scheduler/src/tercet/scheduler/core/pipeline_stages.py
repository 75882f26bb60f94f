"""Pipeline stages of the executor, as the planner sees them."""


class PipelineStages:
    """Rules for an executor whose stages each compute another plan; without effect for one stage."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._full = False
        self.in_flight = 0
        """Plans in flight when the present one was begun."""

    @property
    def several(self) -> bool:
        """Return whether there is more than one stage: a choice with a token in flight is then in no later plan."""
        return self._count > 1

    def begin(self, in_flight: int) -> None:
        """Note how many plans are in flight."""
        self.in_flight = in_flight
        self._full = self.several and in_flight >= self._count

    def most_decodes(self, running: int) -> int:
        """Return the most decodes of a plan: an equal share of the running choices, as the others have other plans.

        While every stage has a plan, only chunks of prompts go ahead: more plans of decodes would be smaller ones.
        """
        return 0 if self._full else -(-running // self._count)

"""What clients come back for, put together: stored responses, work in the background, conversations and sessions."""

from tercet.frontend.api.responses.background import Background
from tercet.frontend.api.responses.conversation_store import ConversationStore
from tercet.frontend.api.responses.draft import ResponseDrafter
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.api.sglang.session_store import SessionStore
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.database import Database
from tercet.frontend.manager.tokenizer_manager import TokenizerManager


class Kept:
    """Everything that stands in the one file. It closes the file, too."""

    def __init__(self, manager: TokenizerManager, planner: ChatPlanner, database: Database) -> None:
        self._database = database
        self.responses = ResponseStore(database, manager.peer)
        self.conversations = ConversationStore(database)
        drafter = ResponseDrafter(manager, planner, self.responses, self.conversations)
        self.background = Background(manager, drafter, self.responses)
        self.sessions = SessionStore(database)

    def start(self) -> None:
        """Begin to look for what frontends that are gone have left."""
        self.background.start()

    async def close(self) -> None:
        """Leave what is not done to others."""
        await self.background.close()
        await self._database.close()

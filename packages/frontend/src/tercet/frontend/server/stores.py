"""SQLite stores of one frontend: chats, responses, conversations, sessions, and the background worker."""

from tercet.frontend.api.openai.stored.store import StoredChats
from tercet.frontend.api.responses.background import BackgroundWorker
from tercet.frontend.api.responses.conversation_store import ConversationStore
from tercet.frontend.api.responses.draft import ResponseDrafter
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.api.sglang.session_store import SessionStore
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.database import Database
from tercet.frontend.manager.tokenizer_manager import TokenizerManager


class Stores:
    """Stores that share one database file, which this object owns."""

    def __init__(self, manager: TokenizerManager, planner: ChatPlanner, database: Database) -> None:
        self._database = database
        self.responses = ResponseStore(database, manager.peer)
        self.conversations = ConversationStore(database)
        drafter = ResponseDrafter(manager, planner, self.responses, self.conversations)
        self.background = BackgroundWorker(manager, drafter, self.responses)
        self.sessions = SessionStore(database)
        self.chats = StoredChats(database)

    def start(self) -> None:
        """Start to look for background responses that dead frontends have left."""
        self.background.start()

    async def close(self) -> None:
        """Stop background work, which other frontends take over, and close the database."""
        await self.background.close()
        await self._database.close()

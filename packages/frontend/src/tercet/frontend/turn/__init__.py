"""One turn of a chat, whatever endpoint it came by: what was asked, what is generated for it, and what was answered."""

"""Images and audio clips of steps: what frontends sent, what encoders made of it, and where tokens read it."""

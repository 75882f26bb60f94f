"""OpenAI's Audio API: transcriptions and translations of audio."""

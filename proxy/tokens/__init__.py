"""Tokenization of text and chat prompts into the engine's token ids."""

"""Text and chat prompts as the token ids the engine will make of them."""

"""The engine model: no clock, no I/O, no asyncio. Whoever drives it passes the engine time in seconds."""

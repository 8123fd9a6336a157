"""State that several proxies in front of one fleet share, as each knows it. Imports the standard library only."""

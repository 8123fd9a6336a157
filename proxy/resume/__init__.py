"""Resumes a broken stream on another engine: the plan, the run, and the splice point."""

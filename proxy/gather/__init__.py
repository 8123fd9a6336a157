"""Admin requests answered for all workers, by whichever of them received one: it asks all and merges their answers.

May import ``core`` and what is below it.
"""

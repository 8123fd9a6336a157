"""The reference page of policies, planners and admission rules, generated from their docstrings."""

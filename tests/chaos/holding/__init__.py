"""Held requests while clients leave, engines die and the rule is switched."""
